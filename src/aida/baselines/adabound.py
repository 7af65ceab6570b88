"""AdaBound: Adam with its stepsizes clamped between bounds that converge to one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from aida.baselines.contract import Baseline, Bucket, check_positive
from aida.catalog import Entry, Paper
from aida.readings import Group, Reading, exact


class AdaBound(Baseline):
    """Adam at first, SGD with momentum and rate ``final_lr`` in the end.

    With gradient ``g`` and ``f = final_lr * lr / base_lr``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        a = lr * sqrt(1 - beta2**t) / (1 - beta1**t) / (sqrt(v) + eps)
        p = p - clamp(a, f * (1 - 1 / (gamma * t + 1)), f * (1 + 1 / (gamma * t))) * m

    Args:
        final_lr: the value that both bounds converge to.
        gamma: how fast the bounds converge.
        base_lr: the lr that ``final_lr`` belongs to, so that a schedule scales both; None takes the lr of
            the group when it is added, and stores it in the group.
        others: as for :class:`Baseline`.
    """

    hyper: ClassVar = {**Baseline.hyper, "final_lr": 0.1, "gamma": 1e-3}
    options: ClassVar = {"base_lr": None, **Baseline.options}

    def check(self, group: Group) -> None:
        super().check(group)
        check_positive(group, "final_lr", "AdaBound becomes SGD with this learning rate; the authors use 0.1")
        check_positive(group, "gamma", "it sets how fast the bounds close; the authors use 1e-3")
        start = {"base_lr": float(group["lr"])} if group["base_lr"] is None else group
        check_positive(start, "base_lr", "final_lr is scaled by lr / base_lr; pass base_lr if lr starts at 0")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["base_lr"] is None:
            group["base_lr"] = float(group["lr"])

    def update(self, bucket: Bucket) -> None:
        beta1, beta2 = bucket.group["betas"]
        t, lr = bucket.t, bucket.lr
        lower, upper = bounds(t, bucket.group)

        # moments and variance
        bucket.update_moments(beta1, beta2)

        # parameters
        factors = torch._foreach_sqrt(bucket.state["exp_avg_sq"])
        torch._foreach_add_(factors, bucket.group["eps"])
        torch._foreach_reciprocal_(factors)
        torch._foreach_mul_(factors, bucket.each(lr * (1 - beta2**t).sqrt() / (1 - beta1**t)))
        torch._foreach_clamp_min_(factors, bucket.each(lr * lower))
        torch._foreach_clamp_max_(factors, bucket.each(lr * upper))
        torch._foreach_mul_(factors, bucket.state["exp_avg"])
        torch._foreach_sub_(bucket.params, factors)


def bounds(t: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return the lower and upper bound of the factor of m, relative to the learning rate."""
    final = group["final_lr"] / group["base_lr"]
    gamma = group["gamma"]
    return final * (1 - 1 / (gamma * t + 1)), final * (1 + 1 / (gamma * t))


def _stepsize(chunks: Sequence[Tensor], step: Tensor, group: Group) -> Tensor:
    t = exact(step)
    beta1, beta2 = group["betas"]
    # the clamped factor multiplies m; times 1 - beta1**t it multiplies m / (1 - beta1**t)
    lower, upper = ((bound * (1 - beta1**t)).to(chunks[0]) for bound in bounds(t, group))
    return chunks[0].sqrt().add_(group["eps"]).reciprocal_().mul_((1 - beta2**t).sqrt()).clamp_(lower, upper)


def _bound(group: Group) -> float:
    final = group["final_lr"] / group["base_lr"]
    # (1 - beta1**t) / t falls with t, so the upper bound times 1 - beta1**t stays below its value for t = 1
    widest = final * (1 + (1 - group["betas"][0]) / group["gamma"])
    return float(min(widest, max(final, 1 / group["eps"])))


ENTRIES = [
    Entry(
        name="adabound",
        title="AdaBound",
        optimizer=AdaBound,
        paper=Paper(
            "L. Luo, Y. Xiong, Y. Liu, X. Sun",
            "Adaptive Gradient Methods with Dynamic Bound of Learning Rate",
            2019,
            "1902.09843",
        ),
        rule=(
            "p -= clamp(lr sqrt(1 - beta2^t) / (1 - beta1^t) / (sqrt(v) + eps), "
            "f (1 - 1 / (gamma t + 1)), f (1 + 1 / (gamma t))) m, f = final_lr lr / base_lr"
        ),
        defaults=AdaBound.hyper,
        reading=Reading(
            about="the clamped factor of m, divided by lr / (1 - beta1**t)",
            eps="outside: added to the root of the second moment, before bias correction and clamping",
            keys=lambda group: ("exp_avg_sq",),
            stepsize=_stepsize,
            bound=_bound,
        ),
        notes=(
            "Version 0.0.5 of the authors' code. Its checkpoints do not contain base_lr; here base_lr is stored in the "
            "group and saved."
        ),
    ),
]
