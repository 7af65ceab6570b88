"""Optimizers outside the catalog: any class given as ``module:Class``, and pairs of two given as ``first+rest``."""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch.optim import Optimizer


class Rival(NamedTuple):
    """An optimizer of another package, as ``aida list`` shows it."""

    name: str
    title: str
    rule: str
    paper: str


#: Those of the extra ``rivals``, and torch's Muon.
RIVALS = (
    Rival("torch.optim:Muon+adamw", "Muon", "orthogonalized momentum for matrices; AdamW for the rest", "Jordan 2024"),
    Rival("pytorch_optimizer:SOAP", "SOAP", "Adam in the eigenbasis of Shampoo's preconditioner", "Vyas 2024"),
    Rival("schedulefree:AdamWScheduleFree", "Schedule-Free AdamW", "averaged weights, no lr decay", "Defazio 2024"),
    Rival("pytorch_optimizer:Lion", "Lion", "lr times the sign of an interpolated momentum", "Chen 2023"),
    Rival("pytorch_optimizer:AdEMAMix", "AdEMAMix", "Adam with a fast and a slow momentum", "Pagliardini 2024"),
)


#: Begins the hyper-parameters of the second optimizer of a pair.
REST = "rest_"


def pair(name: str) -> tuple[str, str]:
    """Split ``first+rest``: an optimizer for hidden matrices and one for all other parameters; rest is often empty."""
    first, _, rest = name.partition("+")
    return (first, rest) if rest else (name, "")


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
    first, rest = pair(name)
    if rest:
        return " + ".join(str(source_of(each)) for each in (first, rest) if ":" in each)
    kind = import_optimizer(name)
    files: dict[str, bytes] = {}
    for module in (name.partition(":")[0], *(each.__module__ for each in kind.__mro__)):
        _gather(module, files)
    if files:
        return "sha256 " + hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    packages = metadata.packages_distributions().get(kind.__module__.partition(".")[0])
    # without the build, such as +cu126
    return f"{packages[0]} {metadata.version(packages[0]).partition('+')[0]}" if packages else None


def _gather(name: str, files: dict[str, bytes]) -> None:
    """Add a module's file and those it imports or refers to, but not what is installed or ours: other records name it.

    Imports are read from the text: a constant does not say which module it is from, and a function may import later.
    """
    path = _own_file(name)
    if path is None or name in files:
        return
    files[name] = path.read_bytes()
    values = vars(sys.modules[name]).values() if name in sys.modules else ()
    found = [each.__name__ if isinstance(each, ModuleType) else getattr(each, "__module__", None) for each in values]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for each in (package, *found, *_imported(files[name], package)):
        if isinstance(each, str):
            _gather(each, files)


def _imported(text: bytes, package: str) -> Iterator[str]:
    """What a module of ``package`` imports: of ``from a import b``, both a and a.b."""
    with suppress(SyntaxError, ValueError, ImportError):  # a compiled module, or a relative import out of its package
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from (base, *(f"{base}.{each.name}" for each in node.names))


def _own_file(name: str) -> Path | None:
    """The file of a module of the user's own; None for any other."""
    top = name.partition(".")[0]
    if top in {"", "aida", "aida_lab", "torch", *sys.stdlib_module_names}:
        return None
    path = None
    try:
        # the package first: looking for a part of a package imports it, and an installed one is not to be imported
        for each in (top, name):
            found = find_spec(each)
            if found is None:
                return None
            path = Path(found.origin) if found.has_location and found.origin else None
            if path is not None and {"site-packages", "dist-packages"}.intersection(path.parts):
                return None
    except (Exception, SystemExit):  # no such module, or whatever a file of the user's own may raise
        return None
    return path
