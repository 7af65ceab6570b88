"""The recursion of Theorem 1 on a convex problem. It records everything that the proof needs.

As in the theorem, it differs from the optimizer in three ways: the learning rate is ``eta / sqrt(t)``, beta1 decays as
``beta1 * lam**t``, and the bias corrections are omitted ("absorbed into eta_t"). With ``bias_corrected=True`` and
``lam=1`` it is Aida with that learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aida.rule import residual_coefficients
from aida_lab.theory.problems import Array, Problem


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of Theorem 1."""

    eta: float
    beta1: float = 0.9
    beta2: float = 0.999
    lam: float = 0.99
    eps: float = 1e-8
    xi: float = 1e-20

    def eta_at(self, steps: Any) -> Any:
        return self.eta / np.sqrt(steps)

    def beta1_at(self, steps: Any) -> Any:
        """beta1 * lam**t for t = 1, 2, ... The first value is beta1 * lam, not beta1 as in the proof."""
        return self.beta1 * self.lam**steps


#: The methods by their number of projections. AdaBelief is without its outer eps, as in Eq. 5.
ADABELIEF, AIDA = 0, 2


@dataclass(frozen=True)
class Trajectory:
    """The record of a run. The first axis is time: row t - 1 of an array is the paper's index t."""

    problem: Problem
    hyper: Hyperparameters
    thetas: Array  #: (T + 1, d): theta_0 ... theta_T
    gradients: Array  #: (T, d): g_1 ... g_T
    momenta: Array  #: (T, d): m_1 ... m_T
    variances: Array  #: (T, d): v_1 ... v_T

    def __len__(self) -> int:
        return len(self.gradients)


def descend(
    problem: Problem,
    projections: int,
    hyper: Hyperparameters,
    steps: int,
    *,
    monotone: bool = False,
    bias_corrected: bool = False,
    batch: int | None = None,
) -> Trajectory:
    """Run the recursion for ``steps`` steps from the problem's start.

    ``monotone`` enforces assumption (3): a variance never falls. ``batch`` draws that many examples per step
    instead of all. Then the gradient is noisy, as in training, and the theorem, which is about the full gradient, does
    not apply.
    """
    theta = problem.start
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    rows = np.random.default_rng(0)
    thetas = np.empty((steps + 1, len(theta)))
    thetas[0] = theta
    gradients, momenta, variances = np.empty((3, steps, len(theta)))
    for t in range(1, steps + 1):
        picked = None if batch is None else rows.integers(0, len(problem.features), batch)  # type: ignore[union-attr]
        g = problem.gradient(theta, picked)
        beta1 = hyper.beta1_at(t)
        m = beta1 * m + (1 - beta1) * g
        kept = v
        residual = _residual(m, g, problem, projections, hyper)
        v = hyper.beta2 * v + (1 - hyper.beta2) * residual**2 + hyper.eps
        if monotone:
            v = np.maximum(v, kept)
        eta = hyper.eta_at(t)
        if bias_corrected:
            eta *= np.sqrt(1 - hyper.beta2**t) / (1 - hyper.beta1**t)
        theta = theta - eta * m / np.sqrt(v)
        thetas[t], gradients[t - 1], momenta[t - 1], variances[t - 1] = theta, g, m, v
    return Trajectory(problem, hyper, thetas, gradients, momenta, variances)


def _residual(m: Array, g: Array, problem: Problem, projections: int, hyper: Hyperparameters) -> Array:
    residual = np.empty_like(m)
    for layer in problem.layers:
        products = float(m[layer] @ g[layer]), float(m[layer] @ m[layer]), float(g[layer] @ g[layer])
        a, b = residual_coefficients(*products, projections, hyper.xi)
        residual[layer] = a * m[layer] + b * g[layer]
    return residual
