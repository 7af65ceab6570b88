"""The effect of eps inside the second moment: Eqs. 5 to 9 of the paper, elementwise on NumPy arrays.

AdaBelief and Aida add eps to the stored second moment at every step. The recursion is linear, so the
stored value is the sum of a part from the residuals, ``belief``, and a part that does not depend on the
gradients, ``floor``:

    s_t = belief_t + floor_t        floor_t = eps * (1 - beta2**t) / (1 - beta2)

After bias correction the floor is the constant ``eps / (1 - beta2)`` at every step. So the stepsize is bounded
from the first step on, by the same value in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Decomposition:
    """The stored second moment of Eq. 5 at every step, and its two parts; the first axis is time."""

    stored: Array
    belief: Array
    floor: Array


def decompose(squared_residuals: Array, beta2: float, eps: float) -> Decomposition:
    """Run the three recursions of Eq. 5 side by side over a sequence of squared residuals."""
    stored = np.empty_like(squared_residuals)
    belief = np.empty_like(squared_residuals)
    floor = np.empty(len(squared_residuals))
    s, s_hat, r = np.zeros_like(squared_residuals[0]), np.zeros_like(squared_residuals[0]), 0.0
    for t, squared in enumerate(squared_residuals):
        s = stored[t] = beta2 * s + (1 - beta2) * squared + eps
        s_hat = belief[t] = beta2 * s_hat + (1 - beta2) * squared
        r = floor[t] = beta2 * r + eps
    return Decomposition(stored, belief, floor)


def floor_after(step: int, beta2: float, eps: float) -> float:
    """The eps part of the second moment after ``step`` steps, in closed form (Eq. 6)."""
    return eps * (1 - beta2**step) / (1 - beta2)


def stepsize(corrected_belief: Array, beta2: float, eps: float) -> Array:
    """The adaptive stepsize exactly (Eq. 7); ``corrected_belief`` is ``belief_t / (1 - beta2**t)``."""
    return np.asarray(1 / np.sqrt(corrected_belief + eps / (1 - beta2)))


def taylor_stepsize(corrected_belief: Array, beta2: float, eps: float) -> Array:
    """The adaptive stepsize of the paper's first-order expansion (Eq. 8).

    Accurate if ``corrected_belief >> eps / (1 - beta2)``. Below that it is not an approximation: it has its
    maximum :func:`taylor_ceiling` at ``corrected_belief = eps / (1 - beta2) / 2`` and falls to zero for smaller
    values, while the exact stepsize rises to its bound.
    """
    root = np.sqrt(corrected_belief)
    return np.asarray(1 / (root + eps / (1 - beta2) / (2 * root)))


def taylor_error(corrected_belief: Array, beta2: float, eps: float) -> Array:
    """Upper bound on ``1 - taylor_stepsize / stepsize``, which is never negative: ``x**2 / (8 a**2)``.

    With a = ``corrected_belief`` and x = ``eps / (1 - beta2)``: the expansion overshoots sqrt(a + x)
    by at most ``x**2 / (8 a**1.5)``, the next term of the alternating series.
    """
    return np.asarray((eps / (1 - beta2) / corrected_belief) ** 2 / 8)


def outer_stepsize(corrected_belief: Array, eps: float) -> Array:
    """The adaptive stepsize with eps only outside the root, as in Adam and AdaBelief*."""
    return np.asarray(1 / (np.sqrt(corrected_belief) + eps))


def stepsize_bound(beta2: float, eps: float, outer_eps: float = 0.0) -> float:
    """No adaptive stepsize exceeds this (Eq. 9); AdaBelief also has ``outer_eps = eps``."""
    return float(1 / (np.sqrt(eps / (1 - beta2)) + outer_eps))


def taylor_ceiling(beta2: float, eps: float) -> float:
    """The maximum of the expansion: the true bound divided by sqrt(2)."""
    return stepsize_bound(beta2, eps) / float(np.sqrt(2))
