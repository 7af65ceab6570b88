"""Aida: AdaBelief with a narrower range of adaptive stepsizes, as a drop-in for torch.optim.AdamW.

``__all__`` lists all public names: the optimizer :class:`Aida`, and :class:`CPUOffload`, which keeps its state on the
CPU; :func:`explain` and :class:`StepsizeProbe`, which describe and measure the stepsizes of an optimizer, with their
sinks, records and :class:`Reading`; and the :mod:`catalog <aida.catalog>` of all optimizers by name. Everything but
:class:`Aida` is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aida._version import __version__
from aida.optimizer import Aida

if TYPE_CHECKING:
    from aida import catalog
    from aida.catalog import find
    from aida.offload import CPUOffload
    from aida.readings import Reading
    from aida.stepsizes import (
        AcrossLayers,
        JsonLines,
        LayerStepsizes,
        Measurement,
        StepsizeLog,
        StepsizeProbe,
        TensorBoard,
        explain,
        read_jsonl,
        sink,
    )

__all__ = [
    "AcrossLayers", "Aida", "CPUOffload", "JsonLines", "LayerStepsizes", "Measurement", "Reading", "StepsizeLog",
    "StepsizeProbe", "TensorBoard", "__version__", "catalog", "explain", "find", "read_jsonl", "sink",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "catalog":
        return import_module("aida.catalog")
    if name in __all__:
        home = {"CPUOffload": "aida.offload", "Reading": "aida.readings", "find": "aida.catalog"}
        return getattr(import_module(home.get(name, "aida.stepsizes")), name)
    raise AttributeError(f"module 'aida' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
