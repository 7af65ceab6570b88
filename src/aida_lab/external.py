"""Optimizers that are not of the catalog: any class that ``module:Class`` names."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.optim import Optimizer


def import_optimizer(name: str) -> type[Any]:
    """The class that ``module:Class`` names; LookupError if there is none.

    The module may be a file of the folder one works in, which takes the place of no other module.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever a file of the user's own may raise
        said = " ".join(str(error).split()) or type(error).__name__
        raise LookupError(
            f"{name!r} cannot be imported ({said}); write it as module:Class, torch.optim:NAdam say"
        ) from None
    if not isinstance(found, type):
        raise LookupError(f"{name!r} is a {type(found).__name__}, not a class of optimizers")
    if not issubclass(found, Optimizer):
        raise LookupError(f"{name!r} is no torch.optim.Optimizer")
    return found


@cache
def source_of(name: str) -> str | None:
    """What tells the code of ``module:Class`` from an edited one: a checksum, or the version of an installed package.

    The checksum is over the class's file and the files of the user's own that it imports; None if none can be read.
    """
    kind = import_optimizer(name)
    files: dict[str, bytes] = {}
    for module in (name.partition(":")[0], *(each.__module__ for each in kind.__mro__)):
        _gather(sys.modules.get(module), files)
    if files:
        return "sha256 " + hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    packages = metadata.packages_distributions().get(kind.__module__.partition(".")[0])
    # without the build, +cu126 say
    return f"{packages[0]} {metadata.version(packages[0]).partition('+')[0]}" if packages else None


def _gather(module: ModuleType | None, files: dict[str, bytes]) -> None:
    """Add a module's file and those it refers to, but not what is installed or ours, which other records name."""
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__ in files or _is_installed(module.__name__, path):
        return
    files[module.__name__] = Path(path).read_bytes()
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            _gather(sys.modules.get(name), files)


def _is_installed(name: str, path: str) -> bool:
    folder = Path(path).absolute().parent
    if name.partition(".")[0] in ("aida", "aida_lab", "torch") or {"site-packages", "dist-packages"}.intersection(
        folder.parts
    ):
        return True
    return folder.is_relative_to(sysconfig.get_path("stdlib"))
