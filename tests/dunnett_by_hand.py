"""Dunnett's test by plain integration: an independent computation for the tests of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr


def dunnett_tail(t: float, control: int, sizes: Sequence[int], freedom: int) -> float:
    """P(max |T_i| > t) for Dunnett's statistics: given the control's mean z and the pooled deviation s, the T_i are
    independent normal numbers. So it is an integral over z and s."""
    share = np.sqrt(np.array(sizes) / (np.array(sizes) + control))
    z = np.linspace(-8.5, 8.5, 401)
    logs = np.linspace(-12, 3, 801)
    s = np.exp(logs)[:, None]
    weight_z = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    half = freedom / 2  # freedom * s^2 is chi-squared
    density = math.log(2) + half * math.log(half) - math.lgamma(half) + freedom * logs - half * np.exp(2 * logs)
    inside = np.ones((len(logs), len(z)))
    for part in share:
        rest = math.sqrt(1 - part**2)
        inside *= ndtr((part * z + t * s) / rest) - ndtr((part * z - t * s) / rest)
    return float(np.exp(density) * (logs[1] - logs[0]) @ (1 - inside) @ weight_z)


def dunnett_by_hand(control: Sequence[float], others: Sequence[Sequence[float]]) -> list[float]:
    """Two-sided adjusted p-values of the others against the control."""
    groups = [control, *others]
    freedom = sum(len(group) - 1 for group in groups)
    pooled = math.sqrt(sum(float(np.var(group, ddof=1)) * (len(group) - 1) for group in groups) / freedom)
    statistics = [
        (np.mean(group) - np.mean(control)) / (pooled * math.sqrt(1 / len(group) + 1 / len(control)))
        for group in others
    ]
    return [dunnett_tail(abs(float(t)), len(control), [len(g) for g in others], freedom) for t in statistics]
