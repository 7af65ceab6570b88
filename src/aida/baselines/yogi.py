"""Yogi: Adam with additive steps of the second moment, so that it cannot decrease fast."""

from __future__ import annotations

from typing import ClassVar

import torch

from aida._step.group_rules import is_finite
from aida.baselines.contract import Baseline, Bucket
from aida.catalog import Entry, Paper
from aida.readings import Group, outer_eps


class Yogi(Baseline):
    """Adam whose second moment changes by at most ``(1 - beta2) * g**2``.

    With gradient ``g``::

        m = beta1 * m + (1 - beta1) * g
        v = v - (1 - beta2) * sign(v - g**2) * g**2
        p = p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    Args:
        initial_accumulator: the first value of m and v.
        others: as for :class:`Baseline`.
    """

    hyper: ClassVar = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.0, "initial_accumulator": 1e-6}

    def check(self, group: Group) -> None:
        super().check(group)
        start = group["initial_accumulator"]
        if not is_finite(start) or start < 0:
            raise ValueError(f"initial_accumulator={start!r} must be a finite number >= 0; the authors use 1e-6")

    def update(self, bucket: Bucket) -> None:
        beta1, beta2 = bucket.group["betas"]
        exp_avg_sqs = bucket.state["exp_avg_sq"]

        # moments
        torch._foreach_lerp_(bucket.state["exp_avg"], bucket.grads, 1 - beta1)

        # variance
        squared = torch._foreach_mul(bucket.grads, bucket.grads)
        signs = torch._foreach_sub(exp_avg_sqs, squared)
        torch._foreach_sign_(signs)
        torch._foreach_addcmul_(exp_avg_sqs, signs, squared, value=beta2 - 1)

        # parameters
        bucket.adam_step()


ENTRIES = [
    Entry(
        name="yogi",
        title="Yogi",
        optimizer=Yogi,
        paper=Paper(
            "M. Zaheer, S. J. Reddi, D. Sachan, S. Kale, S. Kumar",
            "Adaptive Methods for Nonconvex Optimization",
            2018,
        ),
        rule="v -= (1 - beta2) sign(v - g^2) g^2; p -= lr m^ / (sqrt(v^) + eps)",
        defaults=Yogi.hyper,
        reading=outer_eps("exp_avg_sq"),
        notes=(
            "As in the comparison's code, both moments start from 1e-6 and are bias-corrected as Adam's are; the "
            "paper's listing leaves the correction out. initial_accumulator=0 starts from zero."
        ),
    ),
]
