"""Adam+: Adam with eps also in the stored second moment. The Aida paper uses it to study the effect of that eps."""

from __future__ import annotations

import torch
from torch import Tensor

from aida.baselines.adam_like import AdamLike, descend, update_moments
from aida.catalog import AIDA_PAPER, Entry
from aida.readings import Group, both_eps


class AdamPlus(AdamLike):
    """Adam with eps in both places (appendix B of the Aida paper); arguments as for :class:`AdamLike`.

    With gradient ``g``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2 + eps
        p = p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)
    """

    moments = ("exp_avg", "exp_avg_sq")

    def update(self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], group: Group) -> None:
        beta1, beta2 = group["betas"]

        # moments and variance
        update_moments(state["exp_avg"], state["exp_avg_sq"], grads, beta1, beta2)
        torch._foreach_add_(state["exp_avg_sq"], group["eps"])

        # parameters
        descend(params, state["exp_avg"], state["exp_avg_sq"], state["step"], group)


ENTRIES = [
    Entry(
        name="adam-plus",
        title="Adam+",
        optimizer=AdamPlus,
        paper=AIDA_PAPER,
        rule="v = beta2 v + (1 - beta2) g^2 + eps; p -= lr m^ / (sqrt(v^) + eps)",
        defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
        reading=both_eps("exp_avg_sq"),
        notes=(
            "Appendix B of the Aida paper: Adam with eps added to its second moment at every step. Only the paper's "
            "figures show it."
        ),
    ),
]
