"""timm on a machine without torchvision, which has no build for a CPU alone that CI could install.

timm imports torchvision for models and data sets, which its optimizers do not use. Empty classes stand in for
torchvision's while timm is imported; everything that the tests call is timm's own code.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Empty(type):
    """A class whose attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _StandIn(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_timm() -> None:
    """Import timm and its optimizers, without torchvision if that is not installed."""
    if find_spec("torchvision") is not None:
        import timm.optim

        return
    sys.meta_path.insert(0, stand_in := _StandIn())
    try:
        import timm.optim  # noqa: F401
    finally:
        sys.meta_path.remove(stand_in)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # other libraries look whether it is there
