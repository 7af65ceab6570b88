"""RAdam: Adam without an adaptive stepsize in the first steps, and with a rectified one after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from aida.baselines.contract import Baseline, Bucket
from aida.catalog import Entry, Paper
from aida.readings import Group, Reading, exact


class RAdam(Baseline):
    """Adam with its stepsize rectified, and plain momentum in the first steps; decoupled weight decay.

    With gradient ``g`` and ``N = n - 2 * t * beta2**t / (1 - beta2**t)``, ``n = 2 / (1 - beta2) - 1``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        r = sqrt((N - 4) * (N - 2) * n / ((n - 4) * (n - 2) * N))
        p = p - lr * (m / (1 - beta1**t)) * r * sqrt(1 - beta2**t) / (sqrt(v) + eps)   if N >= 5
        p = p - lr * (m / (1 - beta1**t))                                              otherwise

    Arguments as for :class:`Baseline`; ``decoupled_weight_decay=False`` is the L2 that torch's RAdam defaults to.
    """

    hyper: ClassVar = {**Baseline.hyper, "decoupled_weight_decay": True}
    options: ClassVar = {}

    def update(self, bucket: Bucket) -> None:
        beta1, beta2 = bucket.group["betas"]
        t = bucket.t
        adaptive_share, factor = rectification(t, beta2)

        # moments and variance
        bucket.update_moments(beta1, beta2)

        # parameters: the denominator is sqrt(v) + eps, and 1 in the first steps.
        # Multiplies instead of branching, so that a step on a device does not synchronize
        denominators = torch._foreach_sqrt(bucket.state["exp_avg_sq"])
        torch._foreach_mul_(denominators, bucket.each(adaptive_share))
        torch._foreach_add_(denominators, bucket.each(adaptive_share * bucket.group["eps"] + (1 - adaptive_share)))
        bucket.descend(denominators, bucket.lr * factor / (1 - beta1**t))


def rectification(t: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """Return whether the step is adaptive (1) or not yet (0), and ``r * sqrt(1 - beta2**t)`` (1 if not yet)."""
    longest = 2 / (1 - beta2) - 1
    power = beta2**t
    length = longest - 2 * t * power / (1 - power)
    adaptive_share = (length >= 5).to(t.dtype)
    squared = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    # NaN if the length is too short; torch.where does not use it then
    return adaptive_share, torch.where(length >= 5, ((1 - power) * squared).sqrt(), torch.ones_like(t))


def _stepsize(chunks: Sequence[Tensor], step: Tensor, group: Group) -> Tensor:
    adaptive_share, factor = rectification(exact(step), group["betas"][1])
    return chunks[0].sqrt().add_(group["eps"]).reciprocal_().mul_(factor * adaptive_share).add_(1 - adaptive_share)


#: torch's RAdam has the same stepsize; only its default weight decay differs.
READING = Reading(
    about="r * sqrt(1 - beta2**t) / (sqrt(v) + eps) with the rectification r, and 1 in the first steps",
    eps="outside: added to the root of the second moment, before bias correction",
    keys=lambda group: ("exp_avg_sq",),
    stepsize=_stepsize,
    bound=lambda group: max(1.0, 1 / group["eps"]) if group["eps"] else None,
)

ENTRIES = [
    Entry(
        name="radam",
        title="RAdam",
        optimizer=RAdam,
        paper=Paper(
            "L. Liu, H. Jiang, P. He, W. Chen, X. Liu, J. Gao, J. Han",
            "On the Variance of the Adaptive Learning Rate and Beyond",
            2020,
            "1908.03265",
        ),
        rule="p -= lr r sqrt(1 - beta2^t) m^ / (sqrt(v) + eps) once N >= 5, before that p -= lr m^",
        defaults=RAdam.hyper,
        reading=READING,
        notes=(
            "Weight decay is decoupled, as in the authors' code and in the comparison; torch.optim.RAdam adds it to "
            "the gradient by default. The threshold N >= 5 is that of the authors' code; their paper has "
            "N > 4, torch N > 5."
        ),
    ),
]
