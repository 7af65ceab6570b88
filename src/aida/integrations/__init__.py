"""Aida in other libraries: one module per library, each imported only on request.

``aida.integrations.transformers``, ``.lightning``, ``.timm``, ``.torchtitan``, ``.axolotl`` and ``.optax`` (JAX) need
the library of their name. docs/integrations.md has an example for each. Others take :class:`aida.Aida` as it is.
"""
