"""Algorithm 1 of the paper in float64 NumPy, line by line: the judge of every path.

Written from the paper alone and kept free of the package: whole vectors, no shortcut through inner
products, so that an error in the derivations of ``aida.rule`` cannot hide here as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass
class Transcription:
    """One layer: its weights ``theta`` and, from line 2 on, ``m = v = 0``."""

    theta: Vector
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    xi: float = 1e-20
    projections: int = 2
    t: int = 0
    m: Vector = field(init=False)
    v: Vector = field(init=False)

    def __post_init__(self) -> None:
        self.theta = np.array(self.theta, dtype=np.float64)
        self.m = np.zeros_like(self.theta)
        self.v = np.zeros_like(self.theta)

    def step(self, g: Vector) -> None:
        """Lines 3 to 15 for one t."""
        beta1, beta2 = self.betas
        self.t += 1
        # line 5
        self.m = beta1 * self.m + (1 - beta1) * g
        # line 7; the paper's m^(0) = m^(0) is a slip for m^(0) = m_t
        m_k, g_k = self.m, g
        # lines 8 to 11: both new vectors come from the pair of round k - 1
        for _ in range(self.projections):
            inner = np.sum(m_k * g_k)
            onto_g = inner / (np.sum(g_k * g_k) + self.xi) * g_k
            onto_m = inner / (np.sum(m_k * m_k) + self.xi) * m_k
            m_k, g_k = onto_g, onto_m
        # line 12
        self.v = beta2 * self.v + (1 - beta2) * (m_k - g_k) ** 2 + self.eps
        # line 14
        m_tilde = self.m / (1 - beta1**self.t)
        v_tilde = self.v / (1 - beta2**self.t)
        # line 15
        self.theta = self.theta - self.lr * m_tilde / np.sqrt(v_tilde)
