"""The algorithm as pure functions: numbers or tensors in, numbers or tensors out.

Read this file first. One layer is one parameter tensor. With the gradient ``g`` and its running
mean ``m``, Aida feeds the second moment with what is left of ``m - g`` after ``projections`` mutual
projections (Algorithm 1 of the paper):

    m^(k) = <m^(k-1), g^(k-1)> / (|g^(k-1)|^2 + xi) * g^(k-1)
    g^(k) = <m^(k-1), g^(k-1)> / (|m^(k-1)|^2 + xi) * m^(k-1)

A projection only rescales its vector, so the pair after any number of projections is a pair of
multiples of ``m`` and ``g``. :func:`mutual_projections` is the literal loop over vectors and the
judge of everything else; :func:`residual_coefficients` is the same thing over three inner products,
and is what every fast path computes.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

#: A Python number, or a tensor of them: the scalar laws below hold elementwise.
Scalar = TypeVar("Scalar", float, Tensor)

#: ``clip_grad_norm_`` of torch adds this to the norm; so do we, to be its equal.
CLIP_GUARD = 1e-6


class Products(NamedTuple):
    """The three inner products of one layer, after the first moment took the gradient in."""

    dot: Tensor  #: <m, g>
    mm: Tensor  #: |m|^2
    gg: Tensor  #: |g|^2


class Gram(NamedTuple):
    """The inner products of one layer's *old* first moment, gradient and parameter, summed up in float64.

    Enough to get :class:`Products` for any rescaling of the gradient, so that a clip coefficient
    which is known only after all layers were reduced needs no second pass over memory.
    """

    mm: Tensor
    mg: Tensor
    gg: Tensor
    mp: Tensor
    gp: Tensor
    pp: Tensor


def mutual_projections(m: Tensor, g: Tensor, projections: int, xi: float) -> tuple[Tensor, Tensor]:
    """The pair (m, g) after ``projections`` simultaneous projections onto one another, literally."""
    for _ in range(projections):
        dot = torch.sum(m * g)
        m, g = dot / (torch.sum(g * g) + xi) * g, dot / (torch.sum(m * m) + xi) * m
    return m, g


def residual_coefficients(dot: Scalar, mm: Scalar, gg: Scalar, projections: int, xi: float) -> tuple[Scalar, Scalar]:
    """Coefficients (a, b) with ``m^(K) - g^(K) = a * m + b * g``.

    The pair stays of the form (alpha * x, beta * y) where (x, y) is (m, g) after an even and (g, m)
    after an odd number of projections; only alpha and beta are followed.
    """
    alpha = beta = dot**0  # 1 even for NaN: without projections it stays in its element
    xx, yy = mm, gg
    for _ in range(projections):
        inner = alpha * beta * dot
        alpha, beta = inner / (beta * beta * yy + xi) * beta, inner / (alpha * alpha * xx + xi) * alpha
        xx, yy = yy, xx
    return (alpha, -beta) if projections % 2 == 0 else (-beta, alpha)


def rescaled_products(gram: Gram, scale: Tensor, beta1: float | Tensor, l2: float | Tensor) -> Products:
    """Products of the layer whose gradient is ``scale * g + l2 * p``, from the inner products alone."""
    gg = scale * scale * gram.gg + 2 * scale * l2 * gram.gp + l2 * l2 * gram.pp
    mg = scale * gram.mg + l2 * gram.mp
    rest = 1 - beta1
    dot = beta1 * mg + rest * gg
    mm = beta1 * beta1 * gram.mm + 2 * beta1 * rest * mg + rest * rest * gg
    # a sum of squares that cancels to below zero would turn into a negative length
    return Products(dot, mm.clamp(min=0), gg.clamp(min=0))


def is_usable(squared_norm: Tensor, dtype: torch.dtype, clips: bool) -> Tensor:
    """Whether a layer's gradient can be used, from its squared norm in float64.

    NaN and infinity never can. Without clipping the squares must fit into the second moment, whose dtype is
    ``dtype``; clipping brings larger ones back.
    """
    usable = torch.isfinite(squared_norm)
    return usable if clips else usable & (squared_norm <= torch.finfo(dtype).max)


def clip_coefficient(squared_norm: Tensor, clip_norm: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_(..., clip_norm)`` multiplies every gradient with."""
    return (clip_norm / (squared_norm.sqrt() + CLIP_GUARD)).clamp(max=1.0)


def bias_correction(beta: float | Tensor, step: Tensor) -> Tensor:
    """``1 - beta**step``; the caller hands ``step`` in float64, where the difference keeps its digits."""
    # a float base needs the tensor form: 0.0 ** tensor would not trace under torch.compile. Filled on the
    # device, since a copy from the host would wait for it, and is refused while a CUDA graph is captured
    base = beta.to(step) if isinstance(beta, Tensor) else torch.full_like(step, beta)
    return 1 - base**step


def stepsize_bound(beta2: float, eps: float) -> float:
    """No adaptive stepsize exceeds this: eps enters the stored variance at every step."""
    return math.sqrt((1 - beta2) / eps)
