"""The optimizers Aida is compared with: one method a file, under the contract of ``contract.py``.

Each file ends in ``ENTRIES``, which is all the catalog needs to know of it.
"""
