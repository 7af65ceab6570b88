"""Rounding to fewer bits, as pure functions on tensors. The kernels compute the same bits.

Stochastic rounding goes up with the probability that makes its mean exact. So a change that is smaller than half a
unit in the last place is not lost: it is made in a share of the steps. The random bits come from a counter-based
generator (Philox2x32, 7 rounds). They depend only on a seed, the step and the position of the element in its
parameter. So they are the same after a resume, on every path and however a parameter is sharded.

8-bit state is stored in blocks of 128 elements, each with one scale that is a power of two. Elements are e4m3 floats,
as in ``torch.float8_e4m3fn``. Multiplying by a power of two is exact, so only the elements are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements that share a scale.
BLOCK = 128

#: 16 "random" bits with which rounding is to nearest.
HALF = 0x8000

_ROUNDS = 7
_MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9
_STEP = 0xBB67AE85  # another than between rounds, or two steps would share round keys
_SHARED = 0x85EBCA6B  # of random_word, or its words would be random_words of other positions
_WORD = 0xFFFFFFFF


def random_words(seed: int, step: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words per position, as int64.

    The counter is the position (64 bits), the key is ``seed + step * 0xBB67AE85`` (32 bits).
    """
    low, high = positions & _WORD, positions >> 32 & _WORD
    key = (seed + step.long() * _STEP) & _WORD
    for _ in range(_ROUNDS):
        product = low * _MULTIPLIER  # wraps around at 64 bits; masks select its halves
        low, high = high ^ key ^ (product >> 32 & _WORD), product & _WORD
        key = (key + _WEYL) & _WORD
    return low, high


def random_word(seed: int, step: Tensor, positions: Tensor) -> Tensor:
    """One 32-bit word per position, as int64. An even position and the next one share a call of the generator."""
    low, high = random_words(seed + _SHARED, step, positions >> 1)
    return torch.where(positions & 1 == 0, low, high)


def to_bfloat16(x: Tensor, bits: Tensor | int) -> Tensor:
    """float32 rounded to bf16 by 16 random bits per element (int64). NaN and infinity stay what they are."""
    raw = x.view(torch.int32).long() & _WORD
    rounded = (raw + bits) & 0xFFFF0000
    signed = torch.where(rounded >= 1 << 31, rounded - (1 << 32), rounded).int()
    return torch.where(x.isfinite(), signed.view(torch.float32), x).bfloat16()


def to_float16(x: Tensor, bits: Tensor | int) -> Tensor:
    """float32 rounded to fp16 by 16 random bits per element. NaN and infinity stay what they are."""
    count, unit = _units(x.abs(), bits, mantissa=10, least=-14)
    return torch.where(x.isfinite(), (count * unit).copysign(x), x).half()


def block_scales(x: Tensor) -> Tensor:
    """The scale of each block of 128 elements: the smallest power of two (uint8: its exponent plus 127) that fits.

    ``x`` is 1-dim and float32; the last block may be shorter. Elements that are not finite do not count.
    """
    magnitudes = torch.where(x.isfinite(), x.abs(), 0.0)
    padded = torch.nn.functional.pad(magnitudes, (0, -len(x) % BLOCK))
    raw = padded.view(-1, BLOCK).amax(1).view(torch.int32)
    # 448 is 1.75 * 2**8: adding 0x1fffff carries into the exponent if the mantissa is above 1.75
    return ((raw + 0x1FFFFF >> 23) - 8).clamp(min=1).to(torch.uint8)


def encode(x: Tensor, scales: Tensor, bits: Tensor | int) -> Tensor:
    """The e4m3 codes (uint8) of a 1-dim float32 tensor, rounded by 16 random bits per element."""
    inverse = (254 - scales.int() << 23).view(torch.float32)
    scaled = x.abs() * _per_element(inverse, len(x))
    count, unit = _units(scaled, bits, mantissa=3, least=-6)
    # the codes of a binade continue those of the one below, also from subnormal to normal numbers
    codes = (torch.log2(unit) + 9) * 8 + count
    codes = torch.where(x.isfinite(), codes, 127.0)
    return (codes + 128 * x.signbit()).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of 1-dim codes."""
    powers = (scales.int() << 23).view(torch.float32)
    return codes.view(torch.float8_e4m3fn).float() * _per_element(powers, len(codes))


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of codes of any shape, in the same memory order."""
    wide = torch.empty_like(codes, dtype=torch.float32)
    flat(wide).copy_(decode(flat(codes), scales.reshape(-1)))
    return wide


def encode_(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Write values of the same memory order into codes and their scales, rounded to nearest."""
    new = block_scales(flat(values))
    flat(codes).copy_(encode(flat(values), new, HALF))
    scales.view(-1).copy_(new)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor as one dimension, in memory order, sharing its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _units(magnitude: Tensor, bits: Tensor | int, *, mantissa: int, least: int) -> tuple[Tensor, Tensor]:
    """A magnitude as a number of units in the last place, and the unit. ``least`` is the exponent of the subnormals."""
    exponent = (magnitude.view(torch.int32) >> 23) - 127
    unit = ((exponent.clamp(min=least, max=126) - mantissa + 127) << 23).view(torch.float32)
    exact = magnitude / unit  # a power of two: exact
    below = exact.floor()
    return below + ((exact - below) + bits / 65536 >= 1), unit


def _per_element(values: Tensor, count: int) -> Tensor:
    return values.repeat_interleave(BLOCK)[:count]
