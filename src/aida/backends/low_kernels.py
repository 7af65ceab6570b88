"""The reduce and apply kernels for state in fewer bits and for parameters that are rounded otherwise than to nearest.

They read the tables of kernels.py, whose collect and coefficients kernels serve them too, and do the arithmetic of
its kernels in float32. A program works through its chunk tile by tile, which takes fewer registers, so that more
programs run at a time. A tile has one row per 128 elements: a block of 8-bit state, with one scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aida.backends.kernel_rounding import (
    ADJACENT,
    SHARE,
    block_scales,
    decode,
    encode,
    nearest,
    random_word,
    random_words,
    rounded,
)
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
from aida.backends.kernels import put

#: Fields of storage.Stream, one row per tensor.
SEED = tl.constexpr(0)
FIRST = tl.constexpr(1)
RUN = tl.constexpr(2)
STRIDE = tl.constexpr(3)
STREAM = tl.constexpr(4)


@triton.jit
def _pointer(addresses, row, tensors, tensor, dtype: tl.constexpr, WIDTH: tl.constexpr):
    pointer = tl.load(addresses + row * tensors + tensor).to(tl.pointer_type(dtype))
    # The compiler gives each thread as many adjacent elements as the widest access needs. WIDTH is that number for
    # the widest dtype. With this hint no other tensor suggests more, and all have the same elements in a thread.
    if WIDTH > 1:
        pointer = tl.multiple_of(pointer, WIDTH * dtype.primitive_bitwidth // 8)
    return pointer


@triton.jit
def _tile(pointer, offsets, left, MASKED: tl.constexpr, EVICT: tl.constexpr):
    # no defaults: Triton 3.6 does not take a default string for a constant
    if MASKED:
        return tl.load(pointer + offsets, mask=offsets < left, other=0, eviction_policy=EVICT)
    return tl.load(pointer + offsets, eviction_policy=EVICT)


@triton.jit
def _wide(tile, scales, NATIVE: tl.constexpr):
    return decode(tile, scales, NATIVE) if tile.dtype == tl.uint8 else tile.to(tl.float32)


@triton.jit
def _wide_param(p, compensation, offsets, left, MASKED: tl.constexpr, KAHAN: tl.constexpr):
    wide = _tile(p, offsets, left, MASKED, "").to(tl.float32)
    if KAHAN:
        wide += _tile(compensation, offsets, left, MASKED, "").to(tl.float32)
    return wide


@triton.jit
def _add_sums(sums, x, y, z, TILE: tl.constexpr):
    """Add to each thread's sums its elements of three products: no thread waits for another before the last tile."""
    shape: tl.constexpr = (TILE // ADJACENT, ADJACENT)
    x, y, z = three_sums(tl.reshape(x, shape), tl.reshape(y, shape), tl.reshape(z, shape), 1, COMPILED)
    return sums[0] + x, sums[1] + y, sums[2] + z


@triton.jit
def _reduce_tiles(
    p, g, m, m_scales, compensation, values, amp_scale, partial, chunk, chunks, left,
    HAS_AMP: tl.constexpr, HAS_L2: tl.constexpr, CLIPS: tl.constexpr, KAHAN: tl.constexpr, NATIVE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, TILE // SHARE)
    offsets = rows[:, None] * SHARE + tl.arange(0, SHARE)[None, :]
    zeros = tl.zeros((TILE // ADJACENT,), tl.float64)
    # mm, mg and gg; mp, gp and pp
    sums, sums_with_p = (zeros, zeros, zeros), (zeros, zeros, zeros)
    if not CLIPS:  # else the coefficient is not known yet: products of the raw gradient
        scale = grad_scale(amp_scale, values, HAS_AMP).to(tl.float32)
    if HAS_L2:
        l2 = tl.load(values + L2).to(tl.float32)
    for _ in range(CHUNK // TILE):
        # evict_last keeps both in cache, because apply reads them again
        m0 = _tile(m, offsets, left, MASKED, "evict_last")
        g1 = _tile(g, offsets, left, MASKED, "evict_last").to(tl.float32)
        scales = rows
        if m.dtype.element_ty == tl.uint8:
            scales = _tile(m_scales, rows, tl.cdiv(left, SHARE), MASKED, "")
        m64 = _wide(m0, scales, NATIVE).to(tl.float64)
        if not CLIPS:
            g1 = g1 * scale
            if HAS_L2:  # noqa: SIM102 - l2 exists only then
                if l2 != 0:  # groups without decay share the launch, and need not read their parameters
                    g1 += l2 * _wide_param(p, compensation, offsets, left, MASKED, KAHAN)
        g64 = g1.to(tl.float64)
        sums = _add_sums(sums, m64 * m64, m64 * g64, g64 * g64, TILE)
        if CLIPS and HAS_L2:
            p64 = _wide_param(p, compensation, offsets, left, MASKED, KAHAN).to(tl.float64)
            sums_with_p = _add_sums(sums_with_p, m64 * p64, g64 * p64, p64 * p64, TILE)
        p += TILE
        g += TILE
        m += TILE
        m_scales += TILE // SHARE
        compensation += TILE
        left -= TILE
    mm, mg, gg = three_sums(sums[0], sums[1], sums[2], 0, COMPILED)
    tl.store(partial + chunk, mm)
    tl.store(partial + chunks + chunk, mg)
    tl.store(partial + 2 * chunks + chunk, gg)
    if CLIPS and HAS_L2:
        mp, gp, pp = three_sums(sums_with_p[0], sums_with_p[1], sums_with_p[2], 0, COMPILED)
        tl.store(partial + 3 * chunks + chunk, mp)
        tl.store(partial + 4 * chunks + chunk, gp)
        tl.store(partial + 5 * chunks + chunk, pp)


@triton.jit
def low_reduce_kernel(
    addresses, tensors, sizes, run_of, tensor_of, first_chunk, values, lr_addresses, lr_kinds, amp_scale, found_inf,
    partial, chunks, arrivals, coefficients,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr, HAS_AMP: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr, HAS_L2: tl.constexpr, CLIPS: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, KAHAN: tl.constexpr, NATIVE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write one chunk's share of its tensor's inner products to ``partial``. STATE is uint8 for 8-bit state."""
    if PDL:
        gdc_launch_dependents()  # apply may be launched; it waits for this kernel's end
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of + chunk)
    first = tl.load(first_chunk + tensor)
    start = (chunk - first).to(tl.int64) * CHUNK
    left = tl.load(sizes + tensor) - start
    run = tl.load(run_of + tensor)
    mine = values + run * VALUES
    p = _pointer(addresses, 0, tensors, tensor, PARAM, WIDTH) + start
    g = _pointer(addresses, 1, tensors, tensor, GRAD, WIDTH) + start
    m = _pointer(addresses, 2, tensors, tensor, STATE, WIDTH) + start
    a, c = m, p
    if tl.uint8 == STATE:
        a = _pointer(addresses, 6, tensors, tensor, STATE, 1) + start // SHARE
    if KAHAN:
        c = _pointer(addresses, 8 if tl.uint8 == STATE else 6, tensors, tensor, PARAM, WIDTH) + start
    if left >= CHUNK:
        _reduce_tiles(
            p, g, m, a, c, mine, amp_scale, partial, chunk, chunks, left,
            HAS_AMP, HAS_L2, CLIPS, KAHAN, NATIVE, CHUNK, TILE, False,
        )  # fmt: skip
    else:
        _reduce_tiles(
            p, g, m, a, c, mine, amp_scale, partial, chunk, chunks, left,
            HAS_AMP, HAS_L2, CLIPS, KAHAN, NATIVE, CHUNK, TILE, True,
        )  # fmt: skip
    if MERGED:
        finish_tensor(
            addresses, tensors, tensor, run, mine, lr_addresses, lr_kinds, amp_scale, found_inf, coefficients,
            partial, chunks, arrivals, first, first_chunk, HAS_AMP, HAS_FOUND_INF, BLOCK, STATE,
        )  # fmt: skip


@triton.jit
def _positions(stream, start, offsets, TILE: tl.constexpr, STRIDED: tl.constexpr, WIDE: tl.constexpr):
    """storage.Stream.positions of the elements ``start + offsets``: int64 if WIDE, else uint32."""
    first = tl.load(stream + FIRST) + start
    if STRIDED:
        run = tl.load(stream + RUN)
        gap = tl.load(stream + STRIDE) - run
        # ends of runs before each element; in this tile by a division of 32-bit numbers, which is much faster
        here = start % run
        short = tl.minimum(run, TILE)
        ends = (offsets + (short - tl.minimum(run - here, TILE)).to(tl.int32)) // short.to(tl.int32)
        positions = first + start // run * gap + ends * gap + offsets
        return positions if WIDE else positions.to(tl.uint32)
    return first + offsets if WIDE else first.to(tl.uint32) + offsets.to(tl.uint32)


@triton.jit
def _apply_tiles(
    p, g, m, v, m_scales, v_scales, compensation, stream, step, values, row, eps, start, left,
    ROUNDING: tl.constexpr, STRIDED: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr,
    HAS_L2: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    STATE: tl.constexpr = m.dtype.element_ty
    PARAM: tl.constexpr = p.dtype.element_ty
    RANDOM: tl.constexpr = tl.float32 != STATE or ROUNDING == "stochastic"
    scale = tl.load(row + GRAD_SCALE).to(tl.float32)
    residual_m, residual_g = tl.load(row + RESIDUAL_M).to(tl.float32), tl.load(row + RESIDUAL_G).to(tl.float32)
    stepsize, shrink = tl.load(row + STEPSIZE).to(tl.float32), tl.load(row + SHRINK).to(tl.float32)
    beta1, beta2 = tl.load(values + BETA1), tl.load(values + BETA2)
    rest1, rest2 = (1 - beta1).to(tl.float32), (1 - beta2).to(tl.float32)
    beta1, beta2 = beta1.to(tl.float32), beta2.to(tl.float32)
    share = tl.load(eps).to(tl.float32)
    if HAS_L2:
        l2 = tl.load(values + L2).to(tl.float32)
    if RANDOM:
        seed, count = tl.load(stream + SEED), tl.load(step).to(tl.int64)
    rows = tl.arange(0, TILE // SHARE)
    offsets = rows[:, None] * SHARE + tl.arange(0, SHARE)[None, :]
    for _ in range(CHUNK // TILE):
        # all loads come before the first use, so that they overlap
        g0 = _tile(g, offsets, left, MASKED, "")
        m0 = _tile(m, offsets, left, MASKED, "")
        p0 = _tile(p, offsets, left, MASKED, "")
        v0 = _tile(v, offsets, left, MASKED, "")
        m_scale, v_scale = rows, rows
        blocks = tl.cdiv(left, SHARE)
        if tl.uint8 == STATE:
            m_scale = _tile(m_scales, rows, blocks, MASKED, "")
            v_scale = _tile(v_scales, rows, blocks, MASKED, "")
        p1 = p0.to(tl.float32)
        if ROUNDING == "kahan":
            p1 += _tile(compensation, offsets, left, MASKED, "").to(tl.float32)
        g1 = g0.to(tl.float32) * scale
        if HAS_L2:
            g1 += l2 * p1

        # moments
        m1 = beta1 * _wide(m0, m_scale, NATIVE) + rest1 * g1

        # projections
        residual = residual_m * m1 + residual_g * g1

        # variance
        v1 = _wide(v0, v_scale, NATIVE)
        if tl.uint8 == STATE:
            v1 *= v1
        v1 = beta2 * v1 + rest2 * (residual * residual)
        # 8-bit state is the root of the second moment without what eps has added to it: rule.eps_share
        v2 = v1 + share

        # parameters
        p2 = p1 * shrink - stepsize * (m1 * tl.rsqrt(v2))

        # rounding
        if RANDOM:
            # Adds zero, which the compiler finds out only after it has chosen layouts. Without it the random words
            # would have another layout than the tiles, and pass through shared memory.
            raw = p0.to(tl.uint32 if tl.float32 == PARAM else tl.uint16, bitcast=True)
            placed = offsets + (raw.to(tl.uint64) >> 32).to(tl.int32)
            positions = _positions(stream, start, placed, TILE, STRIDED, WIDE)
            if ROUNDING == "stochastic":
                word, last = random_words(seed, count, positions)
            else:
                word = random_word(seed, count, positions)
        if tl.uint8 == STATE:
            scales = block_scales(m1)
            put(m_scales, scales.to(tl.uint8), rows, blocks, MASKED)
            put(m, encode(m1, scales, word, True, NATIVE), offsets, left, MASKED)
            root = tl.sqrt(v1)
            scales = block_scales(root)
            put(v_scales, scales.to(tl.uint8), rows, blocks, MASKED)
            put(v, encode(root, scales, word, False, NATIVE), offsets, left, MASKED)
        elif tl.bfloat16 == STATE:
            put(m, rounded(m1, word & 0xFFFF, STATE), offsets, left, MASKED)
            put(v, rounded(v2, word >> 16, STATE), offsets, left, MASKED)
        else:
            put(m, m1, offsets, left, MASKED)
            put(v, v2, offsets, left, MASKED)
        if ROUNDING == "stochastic":
            new = rounded(p2, last & 0xFFFF, PARAM)
        else:
            new = nearest(p2, PARAM)
            if ROUNDING == "kahan":
                # at a tie the old value stays, so that an update of zero changes nothing
                stays = tl.abs(p2 - p0.to(tl.float32)) <= tl.abs(p2 - new.to(tl.float32))
                new = tl.where(stays, p0, new)
                put(compensation, nearest(p2 - new.to(tl.float32), PARAM), offsets, left, MASKED)
        put(p, new, offsets, left, MASKED)
        p += TILE
        g += TILE
        m += TILE
        v += TILE
        m_scales += TILE // SHARE
        v_scales += TILE // SHARE
        compensation += TILE
        start += TILE
        left -= TILE


@triton.jit
def low_apply_kernel(
    addresses, tensors, sizes, run_of, tensor_of, first_chunk, values, coefficients, chunks,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr,
    HAS_L2: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr,
    streams, ROUNDING: tl.constexpr, STRIDED: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the new moments and parameters of one chunk. Those of ``apply_kernel``, then rounded."""
    if PDL:
        gdc_wait()
    # in reverse order: what the reduction read last is still in cache
    chunk = chunks - 1 - tl.program_id(0)
    tensor = tl.load(tensor_of + chunk)
    row = coefficients + tensor * COEFFICIENTS
    start = (chunk - tl.load(first_chunk + tensor)).to(tl.int64) * CHUNK
    left = tl.load(sizes + tensor) - start
    mine = values + tl.load(run_of + tensor) * VALUES
    p = _pointer(addresses, 0, tensors, tensor, PARAM, WIDTH) + start
    g = _pointer(addresses, 1, tensors, tensor, GRAD, WIDTH) + start
    m = _pointer(addresses, 2, tensors, tensor, STATE, WIDTH) + start
    v = _pointer(addresses, 3, tensors, tensor, STATE, WIDTH) + start
    # the reduction has counted this step already
    step = _pointer(addresses, 4, tensors, tensor, tl.float32, 1)
    a, b, c = m, v, p
    if tl.uint8 == STATE:
        a = _pointer(addresses, 6, tensors, tensor, STATE, 1) + start // SHARE
        b = _pointer(addresses, 7, tensors, tensor, STATE, 1) + start // SHARE
    if ROUNDING == "kahan":
        c = _pointer(addresses, 8 if tl.uint8 == STATE else 6, tensors, tensor, PARAM, WIDTH) + start
    eps = coefficients + tensors * COEFFICIENTS + tensor if tl.uint8 == STATE else mine + EPS
    stream = addresses
    if tl.float32 != STATE or ROUNDING == "stochastic":
        stream = streams + tensor * STREAM
    if tl.load(row + CHANGE) != 0:
        if left >= CHUNK:
            _apply_tiles(
                p, g, m, v, a, b, c, stream, step, mine, row, eps, start, left,
                ROUNDING, STRIDED, WIDE, NATIVE, HAS_L2, CHUNK, TILE, False,
            )  # fmt: skip
        else:
            _apply_tiles(
                p, g, m, v, a, b, c, stream, step, mine, row, eps, start, left,
                ROUNDING, STRIDED, WIDE, NATIVE, HAS_L2, CHUNK, TILE, True,
            )  # fmt: skip
