"""Aida: AdaBelief with a narrower range of adaptive stepsizes, as a drop-in for torch.optim.AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aida._version import __version__
from aida.optimizer import Aida

if TYPE_CHECKING:
    from aida.stepsizes import StepsizeProbe

__all__ = ["Aida", "StepsizeProbe", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "StepsizeProbe":  # on first use: training with Aida needs none of the catalog
        from aida.stepsizes import StepsizeProbe

        return StepsizeProbe
    raise AttributeError(f"module 'aida' has no attribute {name!r}")
