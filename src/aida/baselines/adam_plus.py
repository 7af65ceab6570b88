"""Adam+: Adam with eps also in the stored second moment. The Aida paper uses it to study the effect of that eps."""

from __future__ import annotations

import torch

from aida.baselines.contract import Baseline, Bucket
from aida.catalog import AIDA_PAPER, Entry
from aida.readings import both_eps


class AdamPlus(Baseline):
    """Adam with eps in both places (appendix B of the Aida paper); arguments as for :class:`Baseline`.

    With gradient ``g``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2 + eps
        p = p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)
    """

    def update(self, bucket: Bucket) -> None:
        # moments and variance
        bucket.update_moments(*bucket.group["betas"])
        torch._foreach_add_(bucket.state["exp_avg_sq"], bucket.group["eps"])

        # parameters
        bucket.adam_step()


ENTRIES = [
    Entry(
        name="adam-plus",
        title="Adam+",
        optimizer=AdamPlus,
        paper=AIDA_PAPER,
        rule="v = beta2 v + (1 - beta2) g^2 + eps; p -= lr m^ / (sqrt(v^) + eps)",
        defaults=AdamPlus.hyper,
        reading=both_eps("exp_avg_sq"),
        notes=(
            "Appendix B of the Aida paper: Adam with eps added to its second moment at every step. Only the paper's "
            "figures show it."
        ),
    ),
]
