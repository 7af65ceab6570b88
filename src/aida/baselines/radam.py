"""RAdam: Adam that waits with its adaptive stepsize until the second moment has seen enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from aida.baselines.adam_like import AdamLike
from aida.baselines.contract import counted, learning_rate, per_tensor
from aida.catalog import Entry, Paper
from aida.readings import Group, Reading, decay_in_words, exact


class RAdam(AdamLike):
    """Adam with its stepsize rectified, and plain momentum in the first steps; decoupled weight decay.

    With gradient ``g`` and ``N = n - 2 * t * beta2**t / (1 - beta2**t)``, ``n = 2 / (1 - beta2) - 1``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        r = sqrt((N - 4) * (N - 2) * n / ((n - 4) * (n - 2) * N))
        p = p - lr * (m / (1 - beta1**t)) * r * sqrt(1 - beta2**t) / (sqrt(v) + eps)   where N >= 5
        p = p - lr * (m / (1 - beta1**t))                                              else

    Arguments as :class:`AdamLike`'s; ``decoupled_weight_decay=False`` is the L2 that torch's RAdam defaults to.
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

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group) -> None:
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        stepsize, adaptive_share, offset = _scalars(state["step"], group, param.dtype)

        # moments
        exp_avg.lerp_(grad, 1 - beta1)

        # variance
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

        # parameters
        denominator = exp_avg_sq.sqrt().mul_(adaptive_share).add_(offset)
        param.sub_(denominator.reciprocal_().mul_(exp_avg).mul_(stepsize))

    def update_foreach(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], group: Group
    ) -> None:
        beta1, beta2 = group["betas"]
        exp_avgs, exp_avg_sqs = state["exp_avg"], state["exp_avg_sq"]
        stepsizes, adaptive_shares, offsets = _scalars(state["step"], group, params[0].dtype)

        # moments
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)

        # variance
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)

        # parameters
        work = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_mul_(work, adaptive_shares)
        torch._foreach_add_(work, offsets)
        torch._foreach_reciprocal_(work)
        torch._foreach_mul_(work, exp_avgs)
        torch._foreach_mul_(work, stepsizes)
        torch._foreach_sub_(params, work)


def rectification(t: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """1 where the step is adaptive and 0 where it is not yet, and ``r * sqrt(1 - beta2**t)`` (1 where not)."""
    longest = 2 / (1 - beta2) - 1
    power = beta2**t
    length = longest - 2 * t * power / (1 - power)
    adaptive_share = (length >= 5).to(t.dtype)
    squared = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    # the root of a length too short is NaN, and is not used
    return adaptive_share, torch.where(length >= 5, ((1 - power) * squared).sqrt(), torch.ones_like(t))


def _scalars(step: Tensor | list[Tensor], group: Group, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The stepsize, and share and offset of ``share * sqrt(v) + offset``: the denominator, or 1 in the first steps.

    Multiplied out instead of branched, so that a step on a device need not ask the host.
    """
    beta1, beta2 = group["betas"]
    t = counted(step)
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
            "the gradient unless told otherwise. The threshold N >= 5 is that of the authors' code; their paper has "
            "N > 4, torch N > 5."
        ),
    ),
]
