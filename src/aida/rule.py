"""The algorithm as pure functions: numbers or tensors in, numbers or tensors out.

Read this file first. One layer is one parameter tensor, with gradient ``g`` and running mean ``m``. Aida's
second moment averages the square of ``m - g`` after ``projections`` mutual projections of the two (Algorithm 1
of the paper):

    m^(k) = <m^(k-1), g^(k-1)> / (|g^(k-1)|^2 + xi) * g^(k-1)
    g^(k) = <m^(k-1), g^(k-1)> / (|m^(k-1)|^2 + xi) * m^(k-1)

A projection only rescales its vector. So after any number of projections both vectors are multiples of ``m``
and ``g``. :func:`mutual_projections` is the literal loop over vectors, against which everything else is tested.
:func:`residual_coefficients` computes the same from three inner products; every fast path uses it.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

#: A Python number, or a tensor of numbers, on which the functions below work elementwise.
Scalar = TypeVar("Scalar", float, Tensor)

#: torch's ``clip_grad_norm_`` adds this to the norm.
CLIP_GUARD = 1e-6


class Products(NamedTuple):
    """The three inner products of one layer, with the new first moment ``m``."""

    dot: Tensor  #: <m, g>
    mm: Tensor  #: |m|^2
    gg: Tensor  #: |g|^2


class Gram(NamedTuple):
    """The inner products of one layer's *old* first moment, gradient and parameter, in float64.

    They give :class:`Products` for any rescaling of the gradient. So a clip coefficient, which is known only
    after all layers are reduced, needs no second pass over memory.
    """

    mm: Tensor
    mg: Tensor
    gg: Tensor
    mp: Tensor
    gp: Tensor
    pp: Tensor


def mutual_projections(m: Tensor, g: Tensor, projections: int, xi: float) -> tuple[Tensor, Tensor]:
    """The pair (m, g) after ``projections`` simultaneous projections onto one another."""
    for _ in range(projections):
        dot = torch.sum(m * g)
        m, g = dot / (torch.sum(g * g) + xi) * g, dot / (torch.sum(m * m) + xi) * m
    return m, g


def residual_coefficients(dot: Scalar, mm: Scalar, gg: Scalar, projections: int, xi: float) -> tuple[Scalar, Scalar]:
    """Coefficients (a, b) with ``m^(K) - g^(K) = a * m + b * g``.

    The pair is always (alpha * x, beta * y), where (x, y) is (m, g) after an even and (g, m) after an odd number
    of projections. The loop computes alpha and beta.
    """
    alpha = beta = dot**0  # 1 even if dot is NaN: without projections a NaN stays in its element
    xx, yy = mm, gg
    for _ in range(projections):
        inner = alpha * beta * dot
        alpha, beta = inner / (beta * beta * yy + xi) * beta, inner / (alpha * alpha * xx + xi) * alpha
        xx, yy = yy, xx
    return (alpha, -beta) if projections % 2 == 0 else (-beta, alpha)


def rescaled_products(gram: Gram, scale: Tensor, beta1: float | Tensor, l2: float | Tensor) -> Products:
    """Products of the layer with the gradient ``scale * g + l2 * p``, computed from inner products alone."""
    gg = scale * scale * gram.gg + 2 * scale * l2 * gram.gp + l2 * l2 * gram.pp
    mg = scale * gram.mg + l2 * gram.mp
    rest = 1 - beta1
    dot = beta1 * mg + rest * gg
    mm = beta1 * beta1 * gram.mm + 2 * beta1 * rest * mg + rest * rest * gg
    # cancellation may make a sum of squares negative
    return Products(dot, mm.clamp(min=0), gg.clamp(min=0))


def is_usable(squared_norm: Tensor, dtype: torch.dtype, clips: bool) -> Tensor:
    """Whether a layer's gradient can be used, from its squared norm in float64.

    NaN and infinity cannot. Without clipping the squares must fit into the second moment, whose dtype is
    ``dtype``; clipping makes larger gradients usable.
    """
    usable = torch.isfinite(squared_norm)
    return usable if clips else usable & (squared_norm <= torch.finfo(dtype).max)


def clip_coefficient(squared_norm: Tensor, clip_norm: float) -> Tensor:
    """The factor that ``torch.nn.utils.clip_grad_norm_(..., clip_norm)`` multiplies every gradient with."""
    return (clip_norm / (squared_norm.sqrt() + CLIP_GUARD)).clamp(max=1.0)


def bias_correction(beta: float | Tensor, step: Tensor) -> Tensor:
    """``1 - beta**step``. Pass ``step`` in float64, in which the difference keeps its digits."""
    # a tensor base, because torch.compile does not trace 0.0 ** tensor. Filled on the device, because a copy from
    # the host synchronizes and is not allowed while a CUDA graph is captured
    base = beta.to(step) if isinstance(beta, Tensor) else torch.full_like(step, beta)
    return 1 - base**step


def eps_share(eps: float, beta2: float | Tensor, step: Tensor) -> Tensor:
    """What eps has added to the second moment in ``step`` steps; the rest is the average of squared residuals."""
    return eps * bias_correction(beta2, step.float() if step.device.type == "mps" else step.double()) / (1 - beta2)


def stepsize_bound(beta2: float, eps: float) -> float:
    """Upper bound of every adaptive stepsize: eps is added to the stored variance at every step."""
    return math.sqrt((1 - beta2) / eps)
