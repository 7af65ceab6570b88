"""The effect of eps inside the second moment: Eqs. 5 to 9 of the paper, elementwise on NumPy arrays.

AdaBelief and Aida add eps to the stored second moment at every step. The recursion is linear, so the
stored value is the sum of a part from the residuals, ``belief``, and a part that does not depend on the
gradients, ``floor``:

    s_t = belief_t + floor_t        floor_t = eps * (1 - beta2**t) / (1 - beta2)

After bias correction the floor is the constant ``eps / (1 - beta2)`` at every step. So the stepsize is bounded
from the first step on, by the same value in every layer.
"""

from __future__ import annotations

import numpy as np

from aida_lab.theory.problems import Array


def stepsize(corrected_belief: Array, beta2: float, eps: float) -> Array:
    """The adaptive stepsize exactly (Eq. 7); ``corrected_belief`` is ``belief_t / (1 - beta2**t)``."""
    return np.asarray(1 / np.sqrt(corrected_belief + eps / (1 - beta2)))


def taylor_stepsize(corrected_belief: Array, beta2: float, eps: float) -> Array:
    """The adaptive stepsize of the paper's first-order expansion (Eq. 8).

    Accurate if ``corrected_belief >> eps / (1 - beta2)``. Below that it is not an approximation: it has its maximum,
    the true bound divided by sqrt(2), at ``corrected_belief = eps / (1 - beta2) / 2`` and falls to zero for smaller
    values, while the exact stepsize rises to its bound.
    """
    root = np.sqrt(corrected_belief)
    return np.asarray(1 / (root + eps / (1 - beta2) / (2 * root)))


def outer_stepsize(corrected_belief: Array, eps: float) -> Array:
    """The adaptive stepsize with eps only outside the root, as in Adam and AdaBelief*."""
    return np.asarray(1 / (np.sqrt(corrected_belief) + eps))


def stepsize_bound(beta2: float, eps: float, outer_eps: float = 0.0) -> float:
    """No adaptive stepsize exceeds this (Eq. 9); AdaBelief also has ``outer_eps = eps``."""
    return float(1 / (np.sqrt(eps / (1 - beta2)) + outer_eps))
