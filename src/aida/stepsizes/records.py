"""The records of a measurement: one per layer, and one across all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerStepsizes:
    """The adaptive stepsizes of one layer (one parameter tensor) after one step."""

    step: int
    layer: str
    method: str
    group: int  #: index of the parameter group
    shape: tuple[int, ...]
    elements: int
    mean: float
    std: float  #: over all elements, divided by their number
    min: float
    max: float
    #: (level, value): the order statistic ``floor(level * (elements - 1))``, within 1.6 %
    quantiles: tuple[tuple[float, float], ...]
    bound: float | None  #: upper bound of the layer's stepsizes, if known
    at_bound: float | None  #: share of elements at 0.99 of the bound or above
    cosine: float | None  #: of momentum and gradient; Aida only
    scale_m: float | None  #: the paper's gamma, the factor of m after the projections; Aida only
    scale_g: float | None  #: the paper's beta, the factor of g after the projections; Aida only
    hyper: Mapping[str, Any]  #: the group's hyper-parameters: lr, betas, eps and others
    # unknown (None) in files of older versions, and if the optimizer has another update than lr * stepsize * momentum
    weight_norm: float | None = None  #: 2-norm of the parameter after the step
    update_norm: float | None = None  #: 2-norm of the update; without decoupled weight decay
    #: share of the elements that such an update is too small to change, by rounding; bf16 and fp16 parameters only
    lost: float | None = None

    @property
    def update_ratio(self) -> float | None:
        """The update-to-weight ratio; None if it is unknown, or all weights are zero."""
        return self.update_norm / self.weight_norm if self.update_norm is not None and self.weight_norm else None


@dataclass(frozen=True)
class AcrossLayers:
    """Statistics across the layers; the last record of each measurement."""

    step: int
    method: str
    layers: int
    elements: int
    spread: float  #: largest layer mean divided by the smallest: the paper's range of layerwise averages
    at_bound: float | None  #: share of all elements at 0.99 of their bound or above


Record = LayerStepsizes | AcrossLayers


@dataclass(frozen=True)
class Measurement:
    """All records of one measurement."""

    layers: tuple[LayerStepsizes, ...]
    across: AcrossLayers


def summarise(layers: Sequence[LayerStepsizes]) -> AcrossLayers:
    """The spread and the share at the bound over the layers of one measurement."""
    means = [layer.mean for layer in layers]
    shares = [(layer.at_bound, layer.elements) for layer in layers if layer.at_bound is not None]
    return AcrossLayers(
        step=layers[0].step,
        method=layers[0].method,
        layers=len(layers),
        elements=sum(layer.elements for layer in layers),
        spread=max(means) / min(means) if min(means) > 0 else math.inf,
        at_bound=sum(share * n for share, n in shares) / sum(n for _, n in shares) if shares else None,
    )
