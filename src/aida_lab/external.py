"""Optimizers outside the catalog: any class given as ``module:Class``."""

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
    """Import the class given as ``module:Class``; LookupError if there is none.

    The module may be a file in the current folder. It does not shadow an installed module.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        said = " ".join(str(error).split()) or type(error).__name__
        raise LookupError(
            f"{name!r} cannot be imported ({said}); write it as module:Class, for example torch.optim:NAdam"
        ) from None
    if not isinstance(found, type):
        raise LookupError(f"{name!r} is a {type(found).__name__}, not an optimizer class")
    if not issubclass(found, Optimizer):
        raise LookupError(f"{name!r} is not a subclass of torch.optim.Optimizer")
    return found


@cache
def source_of(name: str) -> str | None:
    """Identify the version of the code of ``module:Class``: a checksum, or the version of an installed package.

    The checksum covers the class's file and the user's files that it imports. None if neither is available.
    """
    kind = import_optimizer(name)
    files: dict[str, bytes] = {}
    for module in (name.partition(":")[0], *(each.__module__ for each in kind.__mro__)):
        _gather(sys.modules.get(module), files)
    if files:
        return "sha256 " + hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    packages = metadata.packages_distributions().get(kind.__module__.partition(".")[0])
    # without the build, such as +cu126
    return f"{packages[0]} {metadata.version(packages[0]).partition('+')[0]}" if packages else None


def _gather(module: ModuleType | None, files: dict[str, bytes]) -> None:
    """Add a module's file and the files it refers to, except installed ones and ours, which other records name."""
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
