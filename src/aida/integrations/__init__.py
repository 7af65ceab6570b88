"""Aida inside training libraries: one module per library, each imported only on request.

``aida.integrations.transformers``, ``.lightning``, ``.timm``, ``.torchtitan`` and ``.axolotl`` need the library of
their name. docs/integrations.md has an example for each. Other libraries take :class:`aida.Aida` as any optimizer.
"""
