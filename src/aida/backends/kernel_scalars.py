"""The scalars of one tensor as Triton functions: column numbers, sums of partial sums, the functions of rule.py."""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: columns.VALUE_COLUMNS
LR = tl.constexpr(0)
BETA1 = tl.constexpr(1)
BETA2 = tl.constexpr(2)
EPS = tl.constexpr(3)
L2 = tl.constexpr(4)
DECAY = tl.constexpr(5)
XI = tl.constexpr(6)
PROJECTIONS = tl.constexpr(7)
CLIP_NORM = tl.constexpr(8)
SIGN = tl.constexpr(9)
SKIP = tl.constexpr(10)
VALUES = tl.constexpr(11)

#: columns.COEFFICIENT_COLUMNS. SHRINK is 1 - lr * decay.
CHANGE = tl.constexpr(0)
GRAD_SCALE = tl.constexpr(1)
RESIDUAL_M = tl.constexpr(2)
RESIDUAL_G = tl.constexpr(3)
STEPSIZE = tl.constexpr(4)
SHRINK = tl.constexpr(5)
COEFFICIENTS = tl.constexpr(6)

CLIP_GUARD = tl.constexpr(1e-6)

#: False under Triton's interpreter, which runs a custom reduction as a slow loop in Python.
COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")

#: The largest float32.
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def grad_scale(amp_scale, values, HAS_AMP: tl.constexpr):
    """The factor of the raw gradient before clipping: its sign (-1 to maximize), divided by the scale under AMP."""
    scale = tl.load(values + SIGN)
    if HAS_AMP:
        scale = scale / tl.load(amp_scale).to(tl.float64)
    return scale


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def three_sums(x, y, z, axis: tl.constexpr, TOGETHER: tl.constexpr):
    if TOGETHER:  # three separate reductions keep more float64 values in registers, which costs 4 % of a step
        return tl.reduce((x, y, z), axis, _add_three)
    return tl.sum(x, axis), tl.sum(y, axis), tl.sum(z, axis)


@triton.jit
def row_sum(partial, first, last, BLOCK: tl.constexpr):
    """The sum of partial sums first..last of one product, in float64 and always in the same order."""
    total = tl.zeros((BLOCK,), tl.float64)
    offsets = tl.arange(0, BLOCK)
    # while, not range: Triton's interpreter under NumPy 2.4 cannot count to a loaded number
    start = first
    while start < last:
        # .cg bypasses the L1 cache, which may hold a line from before another program wrote to it
        total += tl.load(partial + start + offsets, mask=start + offsets < last, other=0, cache_modifier=".cg")
        start += BLOCK
    return tl.sum(total)


@triton.jit
def row_sums(partial, chunks, first, last, BLOCK: tl.constexpr):
    """``row_sum`` of the first three products in one reduction."""
    mm = tl.zeros((BLOCK,), tl.float64)
    mg = tl.zeros((BLOCK,), tl.float64)
    gg = tl.zeros((BLOCK,), tl.float64)
    offsets = tl.arange(0, BLOCK)
    start = first
    while start < last:
        mask = start + offsets < last
        mm += tl.load(partial + start + offsets, mask=mask, other=0, cache_modifier=".cg")
        mg += tl.load(partial + chunks + start + offsets, mask=mask, other=0, cache_modifier=".cg")
        gg += tl.load(partial + 2 * chunks + start + offsets, mask=mask, other=0, cache_modifier=".cg")
        start += BLOCK
    return three_sums(mm, mg, gg, 0, COMPILED)


@triton.jit
def is_usable(gg, clips, SINGLE: tl.constexpr):
    """rule.is_usable: False for NaN; without clipping the squares must fit into the second moment."""
    finite = (gg - gg) == 0
    if SINGLE:
        return finite & (clips | (gg <= LARGEST))
    return finite


@triton.jit
def products(mm0, mg, gg, values, NEW: tl.constexpr):
    """rule.rescaled_products: <m, g>, |m|^2, |g|^2 of the new first moment, from the products of the old one."""
    if NEW:  # these are products of the new one already
        return mg, mm0, gg
    beta1 = tl.load(values + BETA1)
    rest = 1 - beta1
    dot = beta1 * mg + rest * gg
    mm = beta1 * beta1 * mm0 + 2 * beta1 * rest * mg + rest * rest * gg
    # negative only through cancellation; NaN must stay NaN
    return dot, tl.where(mm < 0, 0.0, mm), tl.where(gg < 0, 0.0, gg)


@triton.jit
def finish_scalars(
    addresses, tensors, tensor, run, values, lr_addresses, lr_kinds, found_inf, coefficients,
    scale, dot, mm, gg, usable,
    HAS_FOUND_INF: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """Compute all coefficients of one tensor in float64, and count its step or its skipped step."""
    # projections: rule.residual_coefficients
    xi = tl.load(values + XI)
    projections = tl.load(values + PROJECTIONS).to(tl.int32)
    alpha = tl.full((), 1, tl.float64)  # 1 even if dot is NaN: without projections a NaN stays in its element
    beta = tl.full((), 1, tl.float64)
    xx, yy = mm, gg
    k = 0
    while k < projections:
        inner = alpha * beta * dot
        next_alpha = inner / (beta * beta * yy + xi) * beta
        beta = inner / (alpha * alpha * xx + xi) * alpha
        alpha = next_alpha
        swap = xx
        xx = yy
        yy = swap
        k += 1
    even = projections % 2 == 0

    step_pointer = tl.load(addresses + 4 * tensors + tensor).to(tl.pointer_type(tl.float32))
    step = tl.load(step_pointer)
    t = (step + 1).to(tl.float64)
    correction1 = 1 - tl.exp(t * tl.log(tl.load(values + BETA1)))
    beta2 = tl.load(values + BETA2)
    correction2 = 1 - tl.exp(t * tl.log(beta2))
    lr = tl.load(values + LR)
    lr_kind = tl.load(lr_kinds + run)
    if lr_kind == 1:
        lr = tl.load(tl.load(lr_addresses + run).to(tl.pointer_type(tl.float32))).to(tl.float64)
    if lr_kind == 2:
        lr = tl.load(tl.load(lr_addresses + run).to(tl.pointer_type(tl.float64)))

    bad = (tl.load(values + SKIP) != 0) & (usable == 0)
    change = bad == 0
    if HAS_FOUND_INF:
        overflow = tl.load(found_inf) != 0
        change = change & (overflow == 0)
        bad = bad & (overflow == 0)  # GradScaler skips the whole step, which is not counted for this tensor
    row = coefficients + tensor * COEFFICIENTS
    tl.store(row + CHANGE, change.to(tl.float64))
    tl.store(row + GRAD_SCALE, scale)
    tl.store(row + RESIDUAL_M, tl.where(even, alpha, -beta))
    tl.store(row + RESIDUAL_G, tl.where(even, -beta, alpha))
    tl.store(row + STEPSIZE, lr * tl.sqrt(correction2) / correction1)
    tl.store(row + SHRINK, 1 - lr * tl.load(values + DECAY))
    if EIGHT_BIT:  # rule.eps_share, behind the rows
        tl.store(coefficients + tensors * COEFFICIENTS + tensor, tl.load(values + EPS) * correction2 / (1 - beta2))
    tl.store(step_pointer, tl.where(change, step + 1, step))
    skipped_pointer = tl.load(addresses + 5 * tensors + tensor).to(tl.pointer_type(tl.float32))
    if bad:
        tl.store(skipped_pointer, tl.load(skipped_pointer) + 1)


@triton.jit
def finish_tensor(
    addresses, tensors, tensor, run, values, lr_addresses, lr_kinds, amp_scale, found_inf, coefficients,
    partial, chunks, arrivals, first, first_chunk,
    HAS_AMP: tl.constexpr, HAS_FOUND_INF: tl.constexpr, BLOCK: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """In the last program of a tensor, after all have stored their partial sums: ``finish_scalars``."""
    tl.debug_barrier()
    last = tl.load(first_chunk + tensor + 1)
    # acquire and release, so that the last program sees what all others stored
    if tl.atomic_add(arrivals + tensor, 1, sem="acq_rel") == last - first - 1:
        tl.store(arrivals + tensor, 0)
        mm0, mg, gg = row_sums(partial, chunks, first, last, BLOCK)
        dot, mm, gg = products(mm0, mg, gg, values, tl.float64 == STATE)
        scale = grad_scale(amp_scale, values, HAS_AMP)
        finish_scalars(
            addresses, tensors, tensor, run, values, lr_addresses, lr_kinds, found_inf, coefficients,
            scale, dot, mm, gg, is_usable(gg, False, tl.float64 != STATE), HAS_FOUND_INF, tl.uint8 == STATE,
        )  # fmt: skip
