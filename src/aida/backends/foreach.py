"""The multi-tensor path: plain torch operations over lists of tensors, on any device.

The lists are cut into buckets of limited size. An update needs one temporary of the size of a bucket: it
stays in a CPU's cache, and on a GPU it is much smaller than the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida.backends import Batch, scalar_dtype
from aida.rule import (
    Gram,
    Products,
    bias_correction,
    clip_coefficient,
    is_usable,
    rescaled_products,
    residual_coefficients,
)

#: Elements whose temporaries stay in a CPU's cache: 51 instead of 78 ms per step for ResNet34 on two cores.
CPU_BUCKET = 131_072
#: Enough elements to keep a GPU busy: 64 MiB of float32, the largest temporary of this path.
DEVICE_BUCKET = 1 << 24


class Piece(NamedTuple):
    """The same elements of one tensor's param, grad, exp_avg and exp_avg_var."""

    owner: int
    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_var: Tensor


@dataclass(slots=True)
class Coefficients:
    """Everything that ``apply`` needs besides the tensors: one 0-dim tensor per tensor, on its device."""

    grad: list[Tensor]  #: factor of the raw gradient
    residual_m: list[Tensor]
    residual_g: list[Tensor]
    beta2: list[Tensor]
    eps: list[Tensor]
    guard: list[Tensor]  #: 1 for a tensor that must not change, because its variance may still be 0
    stepsize: list[Tensor]
    scaled_decay: list[Tensor]  #: lr times decoupled weight decay


class _Reduced(NamedTuple):
    squared_norm: Tensor | None
    sums: Tensor
    finite: Tensor

    def nonfinite(self) -> list[int]:
        return [i for i, ok in enumerate(self.finite.tolist()) if not ok]


class Foreach:
    def reduce(self, batch: Batch) -> _Reduced:
        all_sums: list[Tensor] = []
        finite: list[Tensor] = []
        total: Tensor | None = None
        for hyper, where in batch.slices():
            scale = _grad_scale(batch, hyper)
            clips = hyper.clip_norm is not None
            sums = _reduce(batch, where, hyper, scale)
            gg = Gram(*sums.unbind(1)).gg
            ok = is_usable(gg, batch.exp_avgs[where.start].dtype, clips)
            if clips and batch.exchange is None:
                squared = gg * scale * scale
                if hyper.nonfinite == "skip":
                    squared = torch.where(ok, squared, torch.zeros_like(squared))
                total = squared.sum() if total is None else total + squared.sum()
            all_sums.append(sums)
            finite.append(ok)
        return _Reduced(total, torch.cat(all_sums), torch.cat(finite))

    def apply(self, batch: Batch, reduced: _Reduced, squared_norm: Tensor | None) -> None:
        for hyper, where in batch.slices():
            sums = Gram(*reduced.sums[where].unbind(1))
            scale = _grad_scale(batch, hyper).expand_as(sums.gg)
            if _takes_new(batch, hyper):
                products = Products(sums.mg, sums.mm, sums.gg)
            elif hyper.clip_norm is None:
                products = rescaled_products(sums, torch.ones_like(scale), hyper.beta1, 0.0)
            else:
                assert squared_norm is not None
                scale = scale * clip_coefficient(squared_norm, hyper.clip_norm).to(scale.dtype)
                products = rescaled_products(sums, scale, hyper.beta1, hyper.l2)
            change = batch.may_change(reduced.finite[where], hyper)
            # a branch on a value would break a trace and synchronize with a device: elsewhere use a mask
            if change is not None and batch.device.type == "cpu" and not torch.compiler.is_compiling():
                change = None if bool(change.all()) else change
            coefficients = _coefficients(batch, where, hyper, scale, products, change)
            owned = _owns_gradients(batch, where, hyper, change)
            for bucket in _buckets(batch, where):
                grads = [
                    _effective_grad(
                        piece,
                        hyper,
                        coefficients.grad[piece.owner],
                        batch.grad_scale is not None,
                        None if change is None else change[piece.owner],
                    )
                    for piece in bucket
                ]
                _apply_bucket(bucket, grads, hyper, coefficients, owned=owned, guarded=change is not None)
            _advance(batch, where, hyper, reduced.finite[where], change)


def _reduce(batch: Batch, where: slice, hyper: Hyper, scale: Tensor) -> Tensor:
    """Inner products of each tensor's old first moment and the gradient that the update uses, in float64.

    One row of :class:`Gram` per tensor.

    With clipping, whose coefficient is not known yet, inner products of the raw gradient and the parameter.
    """
    dtype = scalar_dtype(batch.device)
    clips = hyper.clip_norm is not None
    partial: list[list[Tensor]] = [[] for _ in range(where.stop - where.start)]
    for bucket in _buckets(batch, where):
        for piece in bucket:  # one at a time, so that the float64 temporaries stay small
            grad = piece.grad if clips else _effective_grad(piece, hyper, scale, batch.grad_scale is not None, None)
            m, g = piece.exp_avg.to(dtype), grad.to(dtype)
            if _takes_new(batch, hyper):
                m = _lerp(m, g, hyper)
            products = [_dot(m, m), _dot(m, g), _dot(g, g)]
            if clips and hyper.l2 != 0:
                p = piece.param.to(dtype)
                products += [_dot(m, p), _dot(g, p), _dot(p, p)]
            else:
                products += [torch.zeros_like(products[0])] * 3
            partial[piece.owner].append(torch.stack(products))
    return _sum_partial(partial, len(Gram._fields), batch.device)


def _sum_partial(partial: list[list[Tensor]], width: int, device: torch.device) -> Tensor:
    """Add partial sums, one row per tensor, always in the order of the pieces: results are bitwise reproducible."""
    nothing = torch.zeros(width, dtype=scalar_dtype(device), device=device)
    rows = [
        torch.stack(pieces).sum(0) if len(pieces) > 1 else pieces[0]
        for pieces in (pieces or [nothing] for pieces in partial)
    ]
    return torch.stack(rows)


def _coefficients(
    batch: Batch, where: slice, hyper: Hyper, scale: Tensor, products: Products, change: Tensor | None
) -> Coefficients:
    step = torch.stack(batch.steps[where]).to(scale.dtype) + 1
    a, b = residual_coefficients(products.dot, products.mm, products.gg, hyper.projections, hyper.xi)
    beta2 = torch.ones_like(step) * hyper.beta2
    eps = torch.full_like(step, hyper.eps)
    guard = torch.zeros_like(step)
    stepsize = (
        hyper.rate * bias_correction(hyper.beta2, step).sqrt() / bias_correction(hyper.beta1, step)
    ) * torch.ones_like(step)
    scaled_decay = torch.ones_like(step) * hyper.rate * hyper.decay
    if change is not None:
        zero, one = torch.zeros_like(step), torch.ones_like(step)
        a, b = torch.where(change, a, zero), torch.where(change, b, zero)
        beta2, eps, guard = (
            torch.where(change, beta2, one), torch.where(change, eps, zero), torch.where(change, zero, one),
        )  # fmt: skip
        stepsize, scaled_decay = torch.where(change, stepsize, zero), torch.where(change, scaled_decay, zero)
    # in the dtype of the state, because list operations need a single dtype
    dtype = batch.exp_avgs[where.start].dtype
    return Coefficients(*(list(x.to(dtype).unbind()) for x in (scale, a, b, beta2, eps, guard, stepsize, scaled_decay)))


def _apply_bucket(
    bucket: list[Piece], grads: list[Tensor], hyper: Hyper, coefficients: Coefficients, *, owned: bool, guarded: bool
) -> None:
    def each(values: list[Tensor]) -> list[Tensor]:
        return [values[piece.owner] for piece in bucket]

    params = [piece.param for piece in bucket]
    means = [piece.exp_avg for piece in bucket]
    variances = [piece.exp_avg_var for piece in bucket]

    # moments
    _lerp_(means, grads, hyper)

    # projections
    work = grads if owned else torch._foreach_mul(grads, each(coefficients.residual_g))
    if owned:
        torch._foreach_mul_(work, each(coefficients.residual_g))
    torch._foreach_addcmul_(work, means, each(coefficients.residual_m))

    # variance
    rest = 1 - hyper.beta2
    if isinstance(rest, Tensor):
        torch._foreach_mul_(work, [rest.to(work[0].dtype).sqrt()] * len(work))
        rest = 1.0
    torch._foreach_mul_(variances, each(coefficients.beta2))
    torch._foreach_addcmul_(variances, work, work, value=rest)
    torch._foreach_add_(variances, each(coefficients.eps))

    # parameters
    torch._foreach_copy_(work, variances)
    if guarded:
        torch._foreach_add_(work, each(coefficients.guard))
    torch._foreach_sqrt_(work)
    torch._foreach_reciprocal_(work)
    torch._foreach_mul_(work, means)
    torch._foreach_mul_(work, each(coefficients.stepsize))
    if hyper.decay != 0:  # part of the same difference, so that a low-precision parameter is rounded once
        torch._foreach_addcmul_(work, [p.to(work[0].dtype) for p in params], each(coefficients.scaled_decay))
    torch._foreach_sub_(params, work)


def _advance(batch: Batch, where: slice, hyper: Hyper, finite: Tensor, change: Tensor | None) -> None:
    if change is None:
        torch._foreach_add_(batch.steps[where], 1)
        return
    dtype = batch.steps[where.start].dtype
    torch._foreach_add_(batch.steps[where], list(change.to(dtype).unbind()))
    if hyper.nonfinite == "skip":
        counts = batch.counts_as_skipped(finite)
        torch._foreach_add_(batch.skipped[where], list(counts.to(batch.skipped[where.start].dtype).unbind()))


def _grad_scale(batch: Batch, hyper: Hyper) -> Tensor:
    scale = torch.full((), hyper.sign, dtype=scalar_dtype(batch.device), device=batch.device)
    return scale if batch.grad_scale is None else scale / batch.grad_scale.reshape(())


def _effective_grad(piece: Piece, hyper: Hyper, scale: Tensor, amp: bool, change: Tensor | None) -> Tensor:
    """The gradient that the update uses: p.grad itself if possible, and p.grad is never changed."""
    grad = piece.grad.to(piece.exp_avg.dtype)
    if amp or hyper.maximize or hyper.clip_norm is not None:
        grad = grad * scale.to(grad.dtype)
    if hyper.l2 != 0:
        grad = grad.add(piece.param, alpha=hyper.l2)
    if change is not None:  # 0 * NaN is NaN, so an unusable gradient is replaced, not scaled
        grad = torch.where(change, grad, piece.exp_avg)
    return grad


def _owns_gradients(batch: Batch, where: slice, hyper: Hyper, change: Tensor | None) -> bool:
    """Whether :func:`_effective_grad` returns new tensors, which the update can then use as its temporary."""
    cast = batch.grads[where.start].dtype != batch.exp_avgs[where.start].dtype
    scaled = batch.grad_scale is not None or hyper.maximize or hyper.clip_norm is not None
    return cast or scaled or hyper.l2 != 0 or change is not None


def _takes_new(batch: Batch, hyper: Hyper) -> bool:
    """Whether to use inner products of the new first moment: deriving them from the old one loses float64 digits."""
    return hyper.clip_norm is None and batch.exp_avgs[0].dtype == torch.float64


def _lerp(mean: Tensor, grad: Tensor, hyper: Hyper) -> Tensor:
    rest = 1 - hyper.beta1
    return mean.lerp(grad, rest.to(mean.dtype) if isinstance(rest, Tensor) else rest)


def _lerp_(means: list[Tensor], grads: list[Tensor], hyper: Hyper) -> None:
    rest = 1 - hyper.beta1
    if isinstance(rest, Tensor):
        for mean, grad in zip(means, grads, strict=True):
            mean.lerp_(grad, rest.to(mean.dtype))
    else:
        torch._foreach_lerp_(means, grads, rest)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return torch.dot(x.reshape(-1), y.reshape(-1))


def _buckets(batch: Batch, where: slice) -> Iterator[list[Piece]]:
    """The run's tensors in pieces, as many per bucket as it holds."""
    limit = CPU_BUCKET if batch.device.type == "cpu" else DEVICE_BUCKET
    bucket: list[Piece] = []
    held = 0
    for piece in _pieces(batch, where, limit):
        size = piece.param.numel()
        if bucket and held + size > limit and not torch.compiler.is_compiling():
            yield bucket
            bucket, held = [], 0
        bucket.append(piece)
        held += size
    if bucket:
        yield bucket


def _pieces(batch: Batch, where: slice, limit: int) -> Iterator[Piece]:
    for owner, i in enumerate(range(where.start, where.stop)):
        tensors = (batch.params[i], batch.grads[i], batch.exp_avgs[i], batch.exp_avg_vars[i])
        size = tensors[0].numel()
        if size == 0:
            continue
        if size <= limit or torch.compiler.is_compiling():
            yield Piece(owner, *tensors)
            continue
        ordered = _in_memory_order(tensors)
        if not all(t.is_contiguous() for t in ordered):
            yield Piece(owner, *tensors)  # a flat view would need a copy: take it whole
            continue
        for parts in zip(*(torch.split(t.view(-1), limit) for t in ordered), strict=True):
            yield Piece(owner, *parts)


def _in_memory_order(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors with their dimensions ordered by falling stride of the parameter."""
    param = tensors[0]
    stride = param.stride()
    order = sorted(range(param.ndim), key=lambda d: (-stride[d], d))
    return tuple(t.permute(order) for t in tensors)
