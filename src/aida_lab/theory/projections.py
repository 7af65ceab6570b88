"""The laws of mutual projections: Eqs. 10 to 14 of the paper, and extensions.

With ``c`` the cosine of ``m`` and ``g`` and ``xi`` ignored:

* even K: ``m^(K) - g^(K) = c**K * (m - g)``, so both scales are ``c**K``, in [0, 1];
* odd K:  ``m^(K) - g^(K) = c**(K-1) * (<m,g>/|g|^2 * g - <m,g>/|m|^2 * m)``, whose scales may be
  negative or larger than 1: the paper's "gamma, beta in (0, 1]" holds for even K only;
* every K: ``|m^(K) - g^(K)| = |c|**K * |m - g|``, ``|m^(K)| = |c|**K * |m|``, ``|g^(K)| = |c|**K * |g|``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aida.rule import mutual_projections, residual_coefficients

#: Negligible compared to the vectors below; the paper's value is 1e-20.
XI = 1e-300


@dataclass(frozen=True)
class Scales:
    """``m^(K) - g^(K) = of_m * m - of_g * g``: the paper's gamma and beta."""

    of_m: float
    of_g: float


@dataclass(frozen=True)
class LawCheck:
    """The largest relative errors of the laws, compared with the literal projections, over all trials."""

    trials: int
    projections: tuple[int, ...]
    closed_form: float  #: m^(K) - g^(K) against the even and odd forms
    lengths: float  #: |m^(K)|, |g^(K)|, |m^(K) - g^(K)| against |c|^K times the original (Eqs. 13, 14)
    angle: float  #: |cos(m^(K), g^(K))| against |c|


def cosine(m: Tensor, g: Tensor) -> float:
    return float((m * g).sum() / (m.norm() * g.norm()))


def scales(m: Tensor, g: Tensor, projections: int) -> Scales:
    """The two scales, from three inner products."""
    products = float((m * g).sum()), float((m * m).sum()), float((g * g).sum())
    a, b = residual_coefficients(*products, projections, XI)
    return Scales(of_m=a, of_g=-b)


def closed_form(m: Tensor, g: Tensor, projections: int) -> Tensor:
    """``m^(K) - g^(K)`` without a loop."""
    c = cosine(m, g)
    if projections % 2 == 0:
        return c**projections * (m - g)
    dot = (m * g).sum()
    return c ** (projections - 1) * (dot / (g * g).sum() * g - dot / (m * m).sum() * m)


def check_laws(trials: int = 200, dimension: int = 50, projections: tuple[int, ...] = (0, 1, 2, 3, 4, 7)) -> LawCheck:
    """Compare the literal loop with the laws on random pairs of many angles and lengths, in float64."""
    generator = torch.Generator().manual_seed(0)
    form = lengths = angle = 0.0
    for _ in range(trials):
        g = torch.randn(dimension, generator=generator, dtype=torch.float64)
        noise = torch.randn(dimension, generator=generator, dtype=torch.float64)
        mix, scale = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        m = (mix * g + (1 - mix) * noise) * 10 ** (4 * scale - 2)
        c = cosine(m, g)
        for k in projections:
            projected_m, projected_g = mutual_projections(m, g, k, XI)
            difference = projected_m - projected_g
            form = max(form, float((difference - closed_form(m, g, k)).norm() / difference.norm()))
            pairs = ((projected_m, m), (projected_g, g), (difference, m - g))
            for after, before in pairs:
                lengths = max(lengths, abs(float(after.norm() / (abs(c) ** k * before.norm())) - 1))
            angle = max(angle, abs(abs(cosine(projected_m, projected_g)) - abs(c)))
    return LawCheck(trials, projections, form, lengths, angle)


def infinity_norm_growth(dimension: int, projections: int) -> float:
    """The largest element of ``m^(K) - g^(K)`` over twice the largest element of ``m`` and ``g``.

    The paper's proof assumes that this is at most 1. That is true for even K (both scales are c**K). For odd K
    one projection can concentrate the length of a spread-out vector in a single element: for the pair constructed
    here the ratio grows like sqrt(dimension) / 4.
    """
    # the unit vector that maximises |g|_1 * |g|_inf: one large element, the rest equal
    phi = math.atan(math.sqrt(dimension - 1)) / 2
    g = torch.full((dimension,), math.sin(phi) / math.sqrt(dimension - 1), dtype=torch.float64)
    g[0] = math.cos(phi)
    g = g / g.abs().max()
    m = torch.ones(dimension, dtype=torch.float64)
    projected_m, projected_g = mutual_projections(m, g, projections, XI)
    return float((projected_m - projected_g).abs().max() / 2)
