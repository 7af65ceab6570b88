"""timm: ``create_optimizer_v2(model, "aida", ...)``."""

from __future__ import annotations

from timm.optim import OptimInfo, list_optimizers
from timm.optim._optim_factory import default_registry

from aida.optimizer import Aida


def register() -> None:
    """Register ``"aida"`` in timm's table of optimizers; ``"lookahead_aida"`` follows from it. Repeat calls do nothing.

    timm's filter of weight decay and its layer decay then work as with ``"adamw"``, and so do its training script's
    options ``--opt aida --opt-eps 1e-8 --opt-betas 0.9 0.999``. Its weight decay is decoupled.
    """
    if "aida" not in list_optimizers():
        description = "AdaBelief with a narrower range of adaptive stepsizes by layerwise mutual projections"
        default_registry.register(OptimInfo("aida", Aida, description, has_betas=True))
