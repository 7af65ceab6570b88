"""The optimizers that Aida is compared with: one file per method; ``contract.py`` is what they share.

Each file ends in ``ENTRIES``, from which the catalog is made.
"""
