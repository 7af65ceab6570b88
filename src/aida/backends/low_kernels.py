"""The reduce and apply kernels for state in fewer bits and for parameters that are rounded otherwise than to nearest.

They read the tables of kernels.py, whose collect and coefficients kernels serve them too, and do the arithmetic of
its kernels in float32. A tile has one row per 128 elements: a block of 8-bit state, with one scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aida.backends.kernel_rounding import SHARE, block_scales, decode, encode, nearest, random_words, rounded
from aida.backends.kernel_scalars import (
    BETA1,
    BETA2,
    CHANGE,
    COEFFICIENTS,
    COMPILED,
    EPS,
    GRAD_SCALE,
    L2,
    RESIDUAL_G,
    RESIDUAL_M,
    SHRINK,
    STEPSIZE,
    VALUES,
    finish_tensor,
    grad_scale,
    three_sums,
)

#: Fields of storage.Stream, one row per tensor.
SEED = tl.constexpr(0)
FIRST = tl.constexpr(1)
RUN = tl.constexpr(2)
STRIDE = tl.constexpr(3)
STREAM = tl.constexpr(4)


@triton.jit
def _pointer(addresses, row, tensors, tensor, dtype: tl.constexpr, WIDTH: tl.constexpr, CACHE: tl.constexpr):
    pointer = tl.load(addresses + row * tensors + tensor, cache_modifier=CACHE).to(tl.pointer_type(dtype))
    # The compiler gives each thread as many adjacent elements as the widest access needs. WIDTH is that number for
    # the widest dtype. With this hint no other tensor suggests more, and all have the same elements in a thread.
    if WIDTH > 1:
        pointer = tl.multiple_of(pointer, WIDTH * dtype.primitive_bitwidth // 8)
    return pointer


@triton.jit
def _tile(pointer, offsets, left, MASKED: tl.constexpr, CACHE: tl.constexpr, EVICT: tl.constexpr):
    # no defaults: Triton 3.6 does not take a default string for a constant
    if MASKED:
        return tl.load(pointer + offsets, mask=offsets < left, other=0, cache_modifier=CACHE, eviction_policy=EVICT)
    return tl.load(pointer + offsets, cache_modifier=CACHE, eviction_policy=EVICT)


@triton.jit
def _put(pointer, value, offsets, left, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, value, mask=offsets < left)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def _wide(tile, scales, NATIVE: tl.constexpr):
    return decode(tile, scales, NATIVE) if tile.dtype == tl.uint8 else tile.to(tl.float32)


@triton.jit
def _wide_param(p, compensation, offsets, left, MASKED: tl.constexpr, KAHAN: tl.constexpr):
    wide = _tile(p, offsets, left, MASKED, "", "").to(tl.float32)
    if KAHAN:
        wide += _tile(compensation, offsets, left, MASKED, "", "").to(tl.float32)
    return wide


@triton.jit
def _reduce_tile(
    p, g, m, m_scales, compensation, values, amp_scale, partial, chunk, chunks, left,
    HAS_AMP: tl.constexpr, HAS_L2: tl.constexpr, CLIPS: tl.constexpr, KAHAN: tl.constexpr, NATIVE: tl.constexpr,
    CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, CHUNK // SHARE)
    offsets = rows[:, None] * SHARE + tl.arange(0, SHARE)[None, :]
    # evict_last keeps both in cache, because apply reads them again
    m0 = _tile(m, offsets, left, MASKED, "", "evict_last")
    g1 = _tile(g, offsets, left, MASKED, "", "evict_last").to(tl.float32)
    scales = rows
    if m.dtype.element_ty == tl.uint8:
        scales = _tile(m_scales, rows, tl.cdiv(left, SHARE), MASKED, "", "")
    m64 = tl.ravel(_wide(m0, scales, NATIVE)).to(tl.float64)
    if not CLIPS:  # else the coefficient is not known yet: products of the raw gradient
        g1 = g1 * grad_scale(amp_scale, values, HAS_AMP).to(tl.float32)
        if HAS_L2:
            l2 = tl.load(values + L2)
            if l2 != 0:  # groups without decay share the launch, and need not read their parameters
                g1 += l2.to(tl.float32) * _wide_param(p, compensation, offsets, left, MASKED, KAHAN)
    g64 = tl.ravel(g1).to(tl.float64)
    mm, mg, gg = three_sums(m64 * m64, m64 * g64, g64 * g64, COMPILED)
    tl.store(partial + chunk, mm)
    tl.store(partial + chunks + chunk, mg)
    tl.store(partial + 2 * chunks + chunk, gg)
    if CLIPS and HAS_L2:
        p64 = tl.ravel(_wide_param(p, compensation, offsets, left, MASKED, KAHAN)).to(tl.float64)
        mp, gp, pp = three_sums(m64 * p64, g64 * p64, p64 * p64, COMPILED)
        tl.store(partial + 3 * chunks + chunk, mp)
        tl.store(partial + 4 * chunks + chunk, gp)
        tl.store(partial + 5 * chunks + chunk, pp)


@triton.jit
def low_reduce_kernel(
    addresses, tensors, sizes, run_of, tensor_of, first_chunk, values, lr_addresses, lr_kinds, amp_scale, found_inf,
    partial, chunks, arrivals, coefficients,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr, HAS_AMP: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr, HAS_L2: tl.constexpr, CLIPS: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, KAHAN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write one chunk's share of its tensor's inner products to ``partial``. STATE is uint8 for 8-bit state."""
    if PDL:
        gdc_launch_dependents()  # apply may start to load what this kernel does not write
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of + chunk)
    first = tl.load(first_chunk + tensor)
    start = (chunk - first).to(tl.int64) * CHUNK
    left = tl.load(sizes + tensor) - start
    run = tl.load(run_of + tensor)
    mine = values + run * VALUES
    p = _pointer(addresses, 0, tensors, tensor, PARAM, WIDTH, "") + start
    g = _pointer(addresses, 1, tensors, tensor, GRAD, WIDTH, "") + start
    m = _pointer(addresses, 2, tensors, tensor, STATE, WIDTH, "") + start
    a, c = m, p
    if tl.uint8 == STATE:
        a = _pointer(addresses, 6, tensors, tensor, STATE, 1, "") + start // SHARE
    if KAHAN:
        c = _pointer(addresses, 8 if tl.uint8 == STATE else 6, tensors, tensor, PARAM, WIDTH, "") + start
    if left >= CHUNK:
        _reduce_tile(
            p, g, m, a, c, mine, amp_scale, partial, chunk, chunks, left,
            HAS_AMP, HAS_L2, CLIPS, KAHAN, NATIVE, CHUNK, False,
        )  # fmt: skip
    else:
        _reduce_tile(
            p, g, m, a, c, mine, amp_scale, partial, chunk, chunks, left,
            HAS_AMP, HAS_L2, CLIPS, KAHAN, NATIVE, CHUNK, True,
        )  # fmt: skip
    if MERGED:
        finish_tensor(
            addresses, tensors, tensor, run, mine, lr_addresses, lr_kinds, amp_scale, found_inf, coefficients,
            partial, chunks, arrivals, first, first_chunk, HAS_AMP, HAS_FOUND_INF, BLOCK, STATE,
        )  # fmt: skip


@triton.jit
def _positions(stream, start, offsets, CHUNK: tl.constexpr, STRIDED: tl.constexpr, CACHE: tl.constexpr):
    """storage.Stream.positions of the elements ``start + offsets``."""
    first = tl.load(stream + FIRST, cache_modifier=CACHE) + start
    if STRIDED:
        run = tl.load(stream + RUN, cache_modifier=CACHE)
        gap = tl.load(stream + STRIDE, cache_modifier=CACHE) - run
        # ends of runs before each element; in this chunk by a division of 32-bit numbers, which is much faster
        here = start % run
        short = tl.minimum(run, CHUNK)
        ends = (offsets + (short - tl.minimum(run - here, CHUNK)).to(tl.int32)) // short.to(tl.int32)
        first += start // run * gap + ends * gap
    return first + offsets


@triton.jit
def _apply_tile(
    p, g, m, v, m_scales, v_scales, compensation, stream, step, values, row, eps, start, left,
    ROUNDING: tl.constexpr, STRIDED: tl.constexpr, NATIVE: tl.constexpr,
    HAS_L2: tl.constexpr, PDL: tl.constexpr, CACHE: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    STATE: tl.constexpr = m.dtype.element_ty
    PARAM: tl.constexpr = p.dtype.element_ty
    rows = tl.arange(0, CHUNK // SHARE)
    offsets = rows[:, None] * SHARE + tl.arange(0, SHARE)[None, :]
    # all loads come before the first use, so that they overlap
    g0 = _tile(g, offsets, left, MASKED, CACHE, "")
    m0 = _tile(m, offsets, left, MASKED, CACHE, "")
    p0 = _tile(p, offsets, left, MASKED, CACHE, "")
    v0 = _tile(v, offsets, left, MASKED, CACHE, "")
    m_scale, v_scale = rows, rows
    blocks = tl.cdiv(left, SHARE)
    if tl.uint8 == STATE:
        m_scale = _tile(m_scales, rows, blocks, MASKED, CACHE, "")
        v_scale = _tile(v_scales, rows, blocks, MASKED, CACHE, "")
    p1 = p0.to(tl.float32)
    if ROUNDING == "kahan":
        p1 += _tile(compensation, offsets, left, MASKED, CACHE, "").to(tl.float32)
    if tl.float32 != STATE or ROUNDING == "stochastic":
        seed = tl.load(stream + SEED, cache_modifier=CACHE)
        # Adds zero, which the compiler finds out only after it has chosen layouts. Without it the random words would
        # have another layout than the tiles, and pass through shared memory.
        raw = p0.to(tl.uint32 if tl.float32 == PARAM else tl.uint16, bitcast=True)
        placed = offsets + (raw.to(tl.uint64) >> 32).to(tl.int32)
        positions = _positions(stream, start, placed, CHUNK, STRIDED, CACHE)
    if PDL:
        gdc_wait()  # the reduction writes nothing else that is read here but the coefficients and the step counter
    if tl.load(row + CHANGE) != 0:
        g1 = g0.to(tl.float32) * tl.load(row + GRAD_SCALE).to(tl.float32)
        if HAS_L2:
            g1 += tl.load(values + L2).to(tl.float32) * p1

        # moments
        beta1 = tl.load(values + BETA1)
        m1 = beta1.to(tl.float32) * _wide(m0, m_scale, NATIVE) + (1 - beta1).to(tl.float32) * g1

        # projections
        residual = tl.load(row + RESIDUAL_M).to(tl.float32) * m1 + tl.load(row + RESIDUAL_G).to(tl.float32) * g1

        # variance
        v1 = _wide(v0, v_scale, NATIVE)
        if tl.uint8 == STATE:
            v1 *= v1
        beta2 = tl.load(values + BETA2)
        v1 = beta2.to(tl.float32) * v1 + (1 - beta2).to(tl.float32) * (residual * residual)
        # 8-bit state is the root of the second moment without what eps has added to it: rule.eps_share
        v2 = v1 + tl.load(eps).to(tl.float32)

        # parameters
        stepsize, shrink = tl.load(row + STEPSIZE).to(tl.float32), tl.load(row + SHRINK).to(tl.float32)
        p2 = p1 * shrink - stepsize * (m1 * tl.rsqrt(v2))

        # rounding
        if tl.float32 != STATE or ROUNDING == "stochastic":
            low, high = random_words(seed, tl.load(step).to(tl.int64), positions)
        if tl.uint8 == STATE:
            scales = block_scales(m1)
            _put(m_scales, scales.to(tl.uint8), rows, blocks, MASKED)
            _put(m, encode(m1, scales, low & 0xFFFF, True), offsets, left, MASKED)
            root = tl.sqrt(v1)
            scales = block_scales(root)
            _put(v_scales, scales.to(tl.uint8), rows, blocks, MASKED)
            _put(v, encode(root, scales, low >> 16, False), offsets, left, MASKED)
        elif tl.bfloat16 == STATE:
            _put(m, rounded(m1, low & 0xFFFF, STATE), offsets, left, MASKED)
            _put(v, rounded(v2, low >> 16, STATE), offsets, left, MASKED)
        else:
            _put(m, m1, offsets, left, MASKED)
            _put(v, v2, offsets, left, MASKED)
        if ROUNDING == "stochastic":
            new = rounded(p2, high & 0xFFFF, PARAM)
        else:
            new = nearest(p2, PARAM)
            if ROUNDING == "kahan":
                # at a tie the old value stays, so that an update of zero changes nothing
                stays = tl.abs(p2 - p0.to(tl.float32)) <= tl.abs(p2 - new.to(tl.float32))
                new = tl.where(stays, p0, new)
                _put(compensation, nearest(p2 - new.to(tl.float32), PARAM), offsets, left, MASKED)
        _put(p, new, offsets, left, MASKED)


@triton.jit
def low_apply_kernel(
    addresses, tensors, sizes, run_of, tensor_of, first_chunk, values, coefficients, chunks,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr,
    HAS_L2: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr,
    streams, ROUNDING: tl.constexpr, STRIDED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write the new moments and parameters of one chunk. Those of ``apply_kernel``, then rounded."""
    # What is read before gdc_wait bypasses the L1 cache, as in apply_kernel.
    CACHE: tl.constexpr = ".cg" if PDL else ""
    # in reverse order: what the reduction read last is still in cache
    chunk = chunks - 1 - tl.program_id(0)
    tensor = tl.load(tensor_of + chunk, cache_modifier=CACHE)
    row = coefficients + tensor * COEFFICIENTS
    start = (chunk - tl.load(first_chunk + tensor, cache_modifier=CACHE)).to(tl.int64) * CHUNK
    left = tl.load(sizes + tensor, cache_modifier=CACHE) - start
    mine = values + tl.load(run_of + tensor, cache_modifier=CACHE) * VALUES
    p = _pointer(addresses, 0, tensors, tensor, PARAM, WIDTH, CACHE) + start
    g = _pointer(addresses, 1, tensors, tensor, GRAD, WIDTH, CACHE) + start
    m = _pointer(addresses, 2, tensors, tensor, STATE, WIDTH, CACHE) + start
    v = _pointer(addresses, 3, tensors, tensor, STATE, WIDTH, CACHE) + start
    # the reduction has counted this step already
    step = _pointer(addresses, 4, tensors, tensor, tl.float32, 1, CACHE)
    a, b, c = m, v, p
    if tl.uint8 == STATE:
        a = _pointer(addresses, 6, tensors, tensor, STATE, 1, CACHE) + start // SHARE
        b = _pointer(addresses, 7, tensors, tensor, STATE, 1, CACHE) + start // SHARE
    if ROUNDING == "kahan":
        c = _pointer(addresses, 8 if tl.uint8 == STATE else 6, tensors, tensor, PARAM, WIDTH, CACHE) + start
    eps = coefficients + tensors * COEFFICIENTS + tensor if tl.uint8 == STATE else mine + EPS
    stream = addresses
    if tl.float32 != STATE or ROUNDING == "stochastic":
        stream = streams + tensor * STREAM
    if left >= CHUNK:
        _apply_tile(
            p, g, m, v, a, b, c, stream, step, mine, row, eps, start, left,
            ROUNDING, STRIDED, NATIVE, HAS_L2, PDL, CACHE, CHUNK, False,
        )  # fmt: skip
    else:
        _apply_tile(
            p, g, m, v, a, b, c, stream, step, mine, row, eps, start, left,
            ROUNDING, STRIDED, NATIVE, HAS_L2, PDL, CACHE, CHUNK, True,
        )  # fmt: skip
