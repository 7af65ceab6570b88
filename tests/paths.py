"""The paths of the update for tests to run over: those that this machine has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch

from aida import Aida
from aida.backends import Backend
from aida.backends.choice import Route, fused_available
from aida.backends.cpu import Cpu
from aida.backends.foreach import Foreach
from aida.backends.reference import Reference
from aida.backends.triton import Triton


class InterpretedAida(Aida):
    """Aida whose fused path is Triton's whatever the device: with TRITON_INTERPRET=1 it runs on a CPU."""

    def _backend(self, route: Route) -> Backend:
        return self._backends.setdefault(route, Triton()) if route.kind == "fused" else super()._backend(route)


@dataclass(frozen=True)
class Path:
    """One way through the step: where it runs and the arguments that ask for it."""

    name: str
    device: str
    flags: Mapping[str, Any]
    backend: type[Backend]  #: whose work it must be
    interpreted: bool = False  #: thousands of times slower: give it small tensors

    def make(self, params: Any, **values: Any) -> Aida:
        """An optimizer whose steps take this path."""
        kind = InterpretedAida if self.interpreted else Aida
        return kind(params, **values, **self.flags)


REFERENCE: Mapping[str, Any] = MappingProxyType({"foreach": False, "fused": False})
FOREACH: Mapping[str, Any] = MappingProxyType({"foreach": True})
FUSED: Mapping[str, Any] = MappingProxyType({"fused": True})


def paths_of(device: str) -> list[Path]:
    found = [
        Path(f"{device}-reference", device, REFERENCE, Reference),
        Path(f"{device}-foreach", device, FOREACH, Foreach),
    ]
    if fused_available(device):
        found.append(Path(f"{device}-fused", device, FUSED, Triton if device == "cuda" else Cpu))
    return found


CUDA_PATHS = tuple(paths_of("cuda")) if torch.cuda.is_available() else ()
NATIVE_PATHS = (*paths_of("cpu"), *CUDA_PATHS)
#: Triton reads the variable when it compiles, so it must be set before Python starts.
INTERPRETED_PATHS = (
    (Path("triton-interpreted", "cpu", MappingProxyType({}), Triton, interpreted=True),)
    if os.environ.get("TRITON_INTERPRET") == "1"
    else ()
)
ALL_PATHS = (*NATIVE_PATHS, *INTERPRETED_PATHS)


def over_paths(paths: Iterable[Path] = ALL_PATHS) -> pytest.MarkDecorator:
    """Run a test that takes ``path`` once on each; those on a GPU carry the marker ``gpu``."""
    return pytest.mark.parametrize(
        "path",
        [pytest.param(path, id=path.name, marks=[pytest.mark.gpu] if path in CUDA_PATHS else []) for path in paths],
    )
