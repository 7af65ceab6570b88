"""AdaBelief, and AdaBelief*, with which the Aida paper studies the effect of eps in the stored variance."""

from __future__ import annotations

from typing import ClassVar

import torch

from aida.baselines.contract import Baseline, Bucket
from aida.catalog import AIDA_PAPER, Entry, Paper
from aida.readings import both_eps, outer_eps


class AdaBelief(Baseline):
    """Adam with the variance of the gradient around its running mean; arguments as for :class:`Baseline`.

    With gradient ``g``::

        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * (g - m)**2 + eps
        p = p - lr * (m / (1 - beta1**t)) / (sqrt(s / (1 - beta2**t)) + eps)
    """

    moments = ("exp_avg", "exp_avg_var")
    #: Whether eps enters the stored variance.
    inner_eps: ClassVar[bool] = True

    def update(self, bucket: Bucket) -> None:
        beta1, beta2 = bucket.group["betas"]
        exp_avgs, exp_avg_vars = bucket.state["exp_avg"], bucket.state["exp_avg_var"]

        # moments
        torch._foreach_lerp_(exp_avgs, bucket.grads, 1 - beta1)

        # variance
        residuals = torch._foreach_sub(bucket.grads, exp_avgs)
        torch._foreach_mul_(exp_avg_vars, beta2)
        torch._foreach_addcmul_(exp_avg_vars, residuals, residuals, value=1 - beta2)
        if self.inner_eps:
            torch._foreach_add_(exp_avg_vars, bucket.group["eps"])

        # parameters
        bucket.adam_step("exp_avg_var")


class AdaBeliefStar(AdaBelief):
    """AdaBelief without eps in the stored variance (appendix A of the Aida paper); same arguments."""

    inner_eps = False


ENTRIES = [
    Entry(
        name="adabelief",
        title="AdaBelief",
        optimizer=AdaBelief,
        paper=Paper(
            "J. Zhuang, T. Tang, Y. Ding, S. Tatikonda, N. Dvornek, X. Papademetris, J. S. Duncan",
            "AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed Gradients",
            2020,
            "2010.07468",
        ),
        rule="s = beta2 s + (1 - beta2)(g - m)^2 + eps; p -= lr m^ / (sqrt(s^) + eps)",
        defaults=AdaBelief.hyper,
        reading=both_eps("exp_avg_var"),
        notes=(
            "Version 0.0.5 of the authors' code, which produced the published results: L2, no rectification. Later "
            "versions (0.1.0 and up) default to eps 1e-16, decoupled weight decay and RAdam's rectification."
        ),
    ),
    Entry(
        name="adabelief-star",
        title="AdaBelief*",
        optimizer=AdaBeliefStar,
        paper=AIDA_PAPER,
        rule="s = beta2 s + (1 - beta2)(g - m)^2; p -= lr m^ / (sqrt(s^) + eps)",
        defaults=AdaBeliefStar.hyper,
        reading=outer_eps("exp_avg_var"),
        notes=(
            "Appendix A of the Aida paper: AdaBelief without eps in the stored variance. Only the paper's figures "
            "show it."
        ),
    ),
]
