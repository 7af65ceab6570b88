"""M-SVAG: momentum SGD that damps each element by the relative variance of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from aida.baselines.contract import Baseline, Bucket
from aida.catalog import Entry, Paper
from aida.readings import Group, Reading, decay_in_words, exact

Tensors = tuple[Tensor, ...] | list[Tensor]


class MSVAG(Baseline):
    """Momentum SGD with every element damped by ``gamma``, its estimated signal-to-noise share.

    With gradient ``g`` and ``rho = (1 - beta1) * (1 + beta1**t) / ((1 + beta1) * (1 - beta1**t))``::

        m = beta1 * m + (1 - beta1) * g,     m_hat = m / (1 - beta1**t)
        v = beta1 * v + (1 - beta1) * g**2,  v_hat = v / (1 - beta1**t)
        s = (v_hat - m_hat**2) / (1 - rho)
        p = p - lr * gamma * m_hat,          gamma = m_hat**2 / (m_hat**2 + rho * s)

    At t = 1 there is no variance yet: s is 0 and gamma is 1.

    Args:
        betas: beta1 is the decay rate of both moments; beta2 is used with ``mixed_bias_correction`` only.
        mixed_bias_correction: correct v by ``1 - beta2**t`` although it decays with beta1, and make the
            first step 0, as the code of the published comparison does.
        others: as for :class:`Baseline`; there is no eps.
    """

    hyper: ClassVar = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0, "mixed_bias_correction": False}

    def check(self, group: Group) -> None:
        super().check(group)
        if group["betas"][0] == 0 or (group["mixed_bias_correction"] and group["betas"][1] == 0):
            raise ValueError(
                f"betas={group['betas']!r} must be > 0 for MSVAG: with 0 the moments show no variance, and "
                "no weight would ever move; the authors use 0.9"
            )

    def update(self, bucket: Bucket) -> None:
        beta1, _ = bucket.group["betas"]
        moves, correction1, correction2, noise = scalar_laws(bucket.t, bucket.group)

        # moments and variance
        bucket.update_moments(beta1, beta1)

        # parameters
        means = torch._foreach_div(bucket.state["exp_avg"], bucket.each(correction1))
        mean_squares = torch._foreach_div(bucket.state["exp_avg_sq"], bucket.each(correction2))
        gammas = damping(means, mean_squares, bucket.each(noise))
        torch._foreach_mul_(gammas, means)
        torch._foreach_mul_(gammas, bucket.each(bucket.lr * moves))
        torch._foreach_sub_(bucket.params, gammas)


def damping(means: Tensors, mean_squares: Tensors, noises: list[Any]) -> Tensors:
    """``mean**2 / (mean**2 + noise * (mean_square - mean**2))``, or 0 if all are 0; overwrites ``mean_squares``."""
    squared: Tensors = torch._foreach_mul(means, means)
    torch._foreach_sub_(mean_squares, squared)
    torch._foreach_clamp_min_(mean_squares, 0)  # a variance: only rounding makes it negative
    torch._foreach_mul_(mean_squares, noises)
    torch._foreach_add_(mean_squares, squared)
    torch._foreach_add_(mean_squares, torch.finfo(means[0].dtype).tiny)  # 0 / 0 becomes 0
    torch._foreach_div_(squared, mean_squares)
    return squared


def scalar_laws(t: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return whether a step moves at all, the corrections of m and of v, and rho / (1 - rho)."""
    beta1, beta2 = group["betas"]
    power = beta1**t
    rho = (1 - beta1) * (1 + power) / ((1 + beta1) * (1 - power))
    first = t <= 1
    noise = torch.where(first, torch.zeros_like(t), rho / (1 - rho))  # at t = 1 rho is 1, and the spread 0
    if group["mixed_bias_correction"]:
        return (~first).to(t.dtype), 1 - power, 1 - beta2**t, noise
    return torch.ones_like(t), 1 - power, 1 - power, noise


def _stepsize(chunks: Sequence[Tensor], step: Tensor, group: Group) -> Tensor:
    moves, correction1, correction2, noise = scalar_laws(exact(step), group)
    (gamma,) = damping([chunks[0] / correction1], [chunks[1] / correction2], [noise])
    return gamma.mul_(moves)


ENTRIES = [
    Entry(
        name="msvag",
        title="MSVAG",
        optimizer=MSVAG,
        paper=Paper(
            "L. Balles, P. Hennig",
            "Dissecting Adam: The Sign, Magnitude and Variance of Stochastic Gradients",
            2018,
            "1705.07774",
        ),
        rule="v = beta1 v + (1 - beta1) g^2; p -= lr gamma m^, gamma = m^^2 / (m^^2 + rho (v^ - m^^2) / (1 - rho))",
        defaults=MSVAG.hyper,
        reading=Reading(
            about="gamma, the damping of each element of the bias-corrected momentum",
            eps="none",
            weight_decay=partial(decay_in_words, effect=", so gamma damps it too"),
            keys=lambda group: ("exp_avg", "exp_avg_sq"),
            stepsize=_stepsize,
            bound=lambda group: 1.0,
        ),
        notes=(
            "One beta for both moments by default, as in the paper. mixed_bias_correction=True does what the code of "
            "the published comparison does: it corrects v with beta2, and its first step is 0. For gradients of mean "
            ".5 and variance 1 the mean gamma is then .006 at t = 2 and .26 at t = 100, instead of .56 and .75. That "
            "code has an eps but never reads it; there is none here."
        ),
    ),
]
