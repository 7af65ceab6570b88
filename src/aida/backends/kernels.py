"""The Triton kernels of the fused CUDA path: reduce, collect, coefficients, apply.

A program handles one chunk of one tensor (reduce, apply) or one tensor (collect, coefficients). It reads which
one, and the pointers, from the tables that triton.py keeps on the device. All tensors and groups of a device and
dtype share one launch of each kernel. Rows of ``addresses`` are numbered as in columns.POINTER_ROWS, rows of
``partial`` and ``sums`` as in columns.PRODUCT_COLUMNS.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aida.backends.kernel_scalars import (
    BETA1,
    BETA2,
    CHANGE,
    CLIP_GUARD,
    CLIP_NORM,
    COEFFICIENTS,
    COMPILED,
    EPS,
    GRAD_SCALE,
    L2,
    RESIDUAL_G,
    RESIDUAL_M,
    SHRINK,
    SKIP,
    STEPSIZE,
    VALUES,
    finish_scalars,
    finish_tensor,
    grad_scale,
    is_usable,
    products,
    row_sum,
    row_sums,
    three_sums,
)


@triton.jit
def _pointer(addresses, row, tensors, tensor, dtype: tl.constexpr, ALIGNED: tl.constexpr, CACHE: tl.constexpr):
    pointer = tl.load(addresses + row * tensors + tensor, cache_modifier=CACHE).to(tl.pointer_type(dtype))
    if ALIGNED:  # lets the compiler use 16-byte accesses; checked on the host
        pointer = tl.multiple_of(pointer, 16)  # as a hint on the integer it would be lost in the cast to a pointer
    return pointer


@triton.jit
def _tile(pointer, offsets, left, MASKED: tl.constexpr, CACHE: tl.constexpr):
    # whole chunks are loaded without a mask: a mask of unknown values would split the 16-byte loads
    if MASKED:
        return tl.load(pointer + offsets, mask=offsets < left, other=0, cache_modifier=CACHE)
    return tl.load(pointer + offsets, cache_modifier=CACHE)


@triton.jit
def put(pointer, value, offsets, left, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, value, mask=offsets < left)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def _reduce_tile(
    p, g, m, values, amp_scale, partial, chunk, chunks, left,
    HAS_AMP: tl.constexpr, HAS_L2: tl.constexpr, CLIPS: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, CHUNK)
    state = m.dtype.element_ty
    # evict_last keeps both in cache, because apply reads them again
    if MASKED:
        m0 = tl.load(m + offsets, mask=offsets < left, other=0, eviction_policy="evict_last")
        g0 = tl.load(g + offsets, mask=offsets < left, other=0, eviction_policy="evict_last").to(state)
    else:
        m0 = tl.load(m + offsets, eviction_policy="evict_last")
        g0 = tl.load(g + offsets, eviction_policy="evict_last").to(state)
    if CLIPS:  # the coefficient is not known yet: products of the raw gradient
        g1 = g0
    else:
        g1 = g0 * grad_scale(amp_scale, values, HAS_AMP).to(state)
        if HAS_L2:
            l2 = tl.load(values + L2)
            if l2 != 0:  # groups without decay share the launch, and need not read their parameters
                g1 += l2.to(state) * _tile(p, offsets, left, MASKED, "").to(state)
        if state == tl.float64:  # deriving the products of the new moment from the old one would lose digits
            beta1 = tl.load(values + BETA1)
            m0 = beta1 * m0 + (1 - beta1) * g1
    # in float64 no square of a float32 overflows, and sums hardly depend on how a layer is cut into pieces
    m64, g64 = m0.to(tl.float64), g1.to(tl.float64)
    mm, mg, gg = three_sums(m64 * m64, m64 * g64, g64 * g64, 0, COMPILED)
    tl.store(partial + chunk, mm)
    tl.store(partial + chunks + chunk, mg)
    tl.store(partial + 2 * chunks + chunk, gg)
    if CLIPS and HAS_L2:
        p64 = _tile(p, offsets, left, MASKED, "").to(tl.float64)
        mp, gp, pp = three_sums(m64 * p64, g64 * p64, p64 * p64, 0, COMPILED)
        tl.store(partial + 3 * chunks + chunk, mp)
        tl.store(partial + 4 * chunks + chunk, gp)
        tl.store(partial + 5 * chunks + chunk, pp)


@triton.jit
def reduce_kernel(
    addresses, tensors, sizes, run_of, tensor_of, first_chunk, values, lr_addresses, lr_kinds, amp_scale, found_inf,
    partial, chunks, arrivals, coefficients,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr, HAS_AMP: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr, HAS_L2: tl.constexpr, CLIPS: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one chunk's share of its tensor's inner products to ``partial`` (products, chunks).

    MERGED: nothing happens between the phases, so the last program of a tensor also computes the tensor's
    coefficients, which saves a launch.
    """
    if PDL:
        gdc_launch_dependents()  # apply may start to load what this kernel does not write
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of + chunk)
    first = tl.load(first_chunk + tensor)
    start = (chunk - first).to(tl.int64) * CHUNK
    left = tl.load(sizes + tensor) - start
    run = tl.load(run_of + tensor)
    mine = values + run * VALUES
    p = _pointer(addresses, 0, tensors, tensor, PARAM, ALIGNED, "") + start
    g = _pointer(addresses, 1, tensors, tensor, GRAD, ALIGNED, "") + start
    m = _pointer(addresses, 2, tensors, tensor, STATE, ALIGNED, "") + start
    if left >= CHUNK:
        _reduce_tile(p, g, m, mine, amp_scale, partial, chunk, chunks, left, HAS_AMP, HAS_L2, CLIPS, CHUNK, False)
    else:
        _reduce_tile(p, g, m, mine, amp_scale, partial, chunk, chunks, left, HAS_AMP, HAS_L2, CLIPS, CHUNK, True)
    if MERGED:
        finish_tensor(
            addresses, tensors, tensor, run, mine, lr_addresses, lr_kinds, amp_scale, found_inf, coefficients,
            partial, chunks, arrivals, first, first_chunk,
            HAS_AMP, HAS_FOUND_INF, BLOCK, STATE,
        )  # fmt: skip


@triton.jit
def collect_kernel(
    run_of, first_chunk, values, amp_scale, partial, chunks, sums, squared, finite, tensors,
    SINGLE: tl.constexpr, HAS_AMP: tl.constexpr, HAS_L2: tl.constexpr, CLIPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tensor's inner products, its share of the clipped norm, and whether its gradient is usable."""
    tensor = tl.program_id(0)
    first, last = tl.load(first_chunk + tensor), tl.load(first_chunk + tensor + 1)
    mine = values + tl.load(run_of + tensor) * VALUES
    mm, mg, gg = row_sums(partial, chunks, first, last, BLOCK)
    tl.store(sums + tensor, mm)
    tl.store(sums + tensors + tensor, mg)
    tl.store(sums + 2 * tensors + tensor, gg)
    clips = tl.load(mine + CLIP_NORM) != 0
    usable = is_usable(gg, clips, SINGLE)
    if CLIPS:
        scale = grad_scale(amp_scale, mine, HAS_AMP)
        unclipped = scale * scale * gg
        if HAS_L2:
            gp = row_sum(partial + 4 * chunks, first, last, BLOCK)
            pp = row_sum(partial + 5 * chunks, first, last, BLOCK)
            tl.store(sums + 3 * tensors + tensor, row_sum(partial + 3 * chunks, first, last, BLOCK))
            tl.store(sums + 4 * tensors + tensor, gp)
            tl.store(sums + 5 * tensors + tensor, pp)
            l2 = tl.load(mine + L2)
            unclipped += 2 * scale * l2 * gp + l2 * l2 * pp
        usable = is_usable(tl.where(clips, gg, unclipped), clips, SINGLE)
        # tl.where instead of a product, because 0 * NaN is NaN
        counts = clips & (usable | (tl.load(mine + SKIP) == 0))
        tl.store(squared + tensor, tl.where(counts, scale * scale * gg, 0.0))
    tl.store(finite + tensor, usable.to(tl.int32))


@triton.jit
def coefficients_kernel(
    addresses, tensors, run_of, values, lr_addresses, lr_kinds, amp_scale, found_inf,
    sums, squared_norm, finite, coefficients,
    HAS_AMP: tl.constexpr, HAS_FOUND_INF: tl.constexpr, HAS_L2: tl.constexpr, CLIPS: tl.constexpr, NEW: tl.constexpr,
    EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """Compute the coefficients of one tensor after something happened between the phases, such as clipping."""
    tensor = tl.program_id(0)
    run = tl.load(run_of + tensor)
    mine = values + run * VALUES
    scale = grad_scale(amp_scale, mine, HAS_AMP)
    mm0, mg, gg = tl.load(sums + tensor), tl.load(sums + tensors + tensor), tl.load(sums + 2 * tensors + tensor)
    if CLIPS:
        clip_norm = tl.load(mine + CLIP_NORM)
        if clip_norm != 0:
            clip = clip_norm / (tl.sqrt(tl.load(squared_norm).to(tl.float64)) + CLIP_GUARD)
            scale = scale * tl.where(clip > 1.0, 1.0, clip)
        gg = scale * scale * gg
        mg = scale * mg
        if HAS_L2:
            l2 = tl.load(mine + L2)
            gg += 2 * scale * l2 * tl.load(sums + 4 * tensors + tensor) + l2 * l2 * tl.load(sums + 5 * tensors + tensor)
            mg += l2 * tl.load(sums + 3 * tensors + tensor)
    dot, mm, gg = products(mm0, mg, gg, mine, NEW)
    finish_scalars(
        addresses, tensors, tensor, run, mine, lr_addresses, lr_kinds, found_inf, coefficients,
        scale, dot, mm, gg, tl.load(finite + tensor) != 0, HAS_FOUND_INF, EIGHT_BIT,
    )  # fmt: skip


@triton.jit
def _apply_tile(
    p, g, m, v, values, row, left,
    HAS_L2: tl.constexpr, PDL: tl.constexpr, CACHE: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, CHUNK)
    state = m.dtype.element_ty
    # all loads come before the first use, so that they overlap
    g1 = _tile(g, offsets, left, MASKED, CACHE).to(state)
    m1 = _tile(m, offsets, left, MASKED, CACHE)
    p1 = _tile(p, offsets, left, MASKED, CACHE).to(state)
    v1 = _tile(v, offsets, left, MASKED, CACHE)
    if PDL:
        gdc_wait()  # the reduction writes nothing else that is read here but the coefficients
    if tl.load(row + CHANGE) != 0:
        g1 = g1 * tl.load(row + GRAD_SCALE).to(state)
        if HAS_L2:
            g1 += tl.load(values + L2).to(state) * p1

        # moments
        beta1 = tl.load(values + BETA1)
        m1 = beta1.to(state) * m1 + (1 - beta1).to(state) * g1

        # projections
        residual = tl.load(row + RESIDUAL_M).to(state) * m1 + tl.load(row + RESIDUAL_G).to(state) * g1

        # variance
        beta2 = tl.load(values + BETA2)
        v1 = beta2.to(state) * v1 + (1 - beta2).to(state) * (residual * residual) + tl.load(values + EPS).to(state)

        # parameters
        stepsize, shrink = tl.load(row + STEPSIZE).to(state), tl.load(row + SHRINK).to(state)
        if state == tl.float32:
            # within 2 ulp; a correctly rounded root and division cost 2 % of the step
            p1 = p1 * shrink - stepsize * (m1 * tl.rsqrt(v1))
        else:
            p1 = p1 * shrink - stepsize * (m1 / tl.sqrt(v1))

        put(p, p1.to(p.dtype.element_ty), offsets, left, MASKED)
        put(m, m1, offsets, left, MASKED)
        put(v, v1, offsets, left, MASKED)


@triton.jit
def apply_kernel(
    addresses, tensors, sizes, run_of, tensor_of, first_chunk, values, coefficients, chunks,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_L2: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the new moments and parameters of one chunk."""
    # What is read before gdc_wait was written before the reduction started, and is visible in the L2 cache. Nothing
    # guarantees that this multiprocessor's L1 cache was invalidated since, so these loads bypass it.
    CACHE: tl.constexpr = ".cg" if PDL else ""
    # in reverse order: what the reduction read last is still in cache
    chunk = chunks - 1 - tl.program_id(0)
    tensor = tl.load(tensor_of + chunk, cache_modifier=CACHE)
    row = coefficients + tensor * COEFFICIENTS
    start = (chunk - tl.load(first_chunk + tensor, cache_modifier=CACHE)).to(tl.int64) * CHUNK
    left = tl.load(sizes + tensor, cache_modifier=CACHE) - start
    mine = values + tl.load(run_of + tensor, cache_modifier=CACHE) * VALUES
    p = _pointer(addresses, 0, tensors, tensor, PARAM, ALIGNED, CACHE) + start
    g = _pointer(addresses, 1, tensors, tensor, GRAD, ALIGNED, CACHE) + start
    m = _pointer(addresses, 2, tensors, tensor, STATE, ALIGNED, CACHE) + start
    v = _pointer(addresses, 3, tensors, tensor, STATE, ALIGNED, CACHE) + start
    if left >= CHUNK:
        _apply_tile(p, g, m, v, mine, row, left, HAS_L2, PDL, CACHE, CHUNK, False)
    else:
        _apply_tile(p, g, m, v, mine, row, left, HAS_L2, PDL, CACHE, CHUNK, True)
