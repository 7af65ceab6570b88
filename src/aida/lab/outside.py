"""Optimizers that are not of the catalog: any class that ``module:Class`` names."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch.optim import Optimizer


def outside(name: str) -> type[Any]:
    """The class that ``module:Class`` names; LookupError if there is none.

    The module may be a file of the folder one works in, which takes the place of no other module.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise LookupError(
            f"{name!r} cannot be imported ({error}); write it as module:Class, torch.optim:NAdam say"
        ) from None
    if not isinstance(found, type):
        raise LookupError(f"{name!r} is a {type(found).__name__}, not a class of optimizers")
    if not issubclass(found, Optimizer):
        raise LookupError(f"{name!r} is no torch.optim.Optimizer")
    return found
