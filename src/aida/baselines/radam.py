"""RAdam: Adam without an adaptive stepsize in the first steps, and with a rectified one after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from aida.baselines.adam_like import AdamLike, update_moments
from aida.baselines.contract import counted, learning_rate, per_tensor
from aida.catalog import Entry, Paper
from aida.readings import Group, Reading, decay_in_words, exact


class RAdam(AdamLike):
    """Adam with its stepsize rectified, and plain momentum in the first steps; decoupled weight decay.

    With gradient ``g`` and ``N = n - 2 * t * beta2**t / (1 - beta2**t)``, ``n = 2 / (1 - beta2) - 1``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        r = sqrt((N - 4) * (N - 2) * n / ((n - 4) * (n - 2) * N))
        p = p - lr * (m / (1 - beta1**t)) * r * sqrt(1 - beta2**t) / (sqrt(v) + eps)   if N >= 5
        p = p - lr * (m / (1 - beta1**t))                                              otherwise

    Arguments as for :class:`AdamLike`; ``decoupled_weight_decay=False`` is the L2 that torch's RAdam defaults to.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, decoupled_weight_decay=decoupled_weight_decay,
            maximize=maximize, foreach=foreach, capturable=capturable,
        )  # fmt: skip

    def update(self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], group: Group) -> None:
        beta1, beta2 = group["betas"]
        exp_avgs, exp_avg_sqs = state["exp_avg"], state["exp_avg_sq"]
        stepsizes, adaptive_shares, offsets = _scalars(state["step"], group, params[0].dtype)

        # moments and variance
        update_moments(exp_avgs, exp_avg_sqs, grads, beta1, beta2)

        # parameters
        work = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_mul_(work, adaptive_shares)
        torch._foreach_add_(work, offsets)
        torch._foreach_reciprocal_(work)
        torch._foreach_mul_(work, exp_avgs)
        torch._foreach_mul_(work, stepsizes)
        torch._foreach_sub_(params, work)


def rectification(t: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """Return whether the step is adaptive (1) or not yet (0), and ``r * sqrt(1 - beta2**t)`` (1 if not yet)."""
    longest = 2 / (1 - beta2) - 1
    power = beta2**t
    length = longest - 2 * t * power / (1 - power)
    adaptive_share = (length >= 5).to(t.dtype)
    squared = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    # NaN if the length is too short; torch.where does not use it then
    return adaptive_share, torch.where(length >= 5, ((1 - power) * squared).sqrt(), torch.ones_like(t))


def _scalars(steps: list[Tensor], group: Group, dtype: torch.dtype) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the stepsize, and share and offset of the denominator ``share * sqrt(v) + offset``, 1 in the first steps.

    Multiplies instead of branching, so that a step on a device does not synchronize.
    """
    beta1, beta2 = group["betas"]
    t = counted(steps)
    adaptive_share, factor = rectification(t, beta2)
    stepsize = learning_rate(group) * factor / (1 - beta1**t)
    offset = adaptive_share * group["eps"] + (1 - adaptive_share)
    return per_tensor(stepsize, dtype), per_tensor(adaptive_share, dtype), per_tensor(offset, dtype)


def _stepsize(chunks: Sequence[Tensor], step: Tensor, group: Group) -> Tensor:
    adaptive_share, factor = rectification(exact(step), group["betas"][1])
    return chunks[0].sqrt().add_(group["eps"]).reciprocal_().mul_(factor * adaptive_share).add_(1 - adaptive_share)


#: torch's RAdam has the same stepsize; only its default weight decay differs.
READING = Reading(
    about="r * sqrt(1 - beta2**t) / (sqrt(v) + eps) with the rectification r, and 1 in the first steps",
    eps="outside: added to the root of the second moment, before bias correction",
    weight_decay=decay_in_words,
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
        defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": True},
        reading=READING,
        notes=(
            "Weight decay is decoupled, as in the authors' code and in the comparison; torch.optim.RAdam adds it to "
            "the gradient by default. The threshold N >= 5 is that of the authors' code; their paper has "
            "N > 4, torch N > 5."
        ),
    ),
]
