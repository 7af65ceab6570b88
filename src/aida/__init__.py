"""Aida: AdaBelief with a narrower range of adaptive stepsizes, as a drop-in for torch.optim.AdamW."""

from aida.optimizer import Aida
from aida.version import __version__

__all__ = ["Aida", "__version__"]
