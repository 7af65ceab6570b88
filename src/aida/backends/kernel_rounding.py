"""rounding.py as Triton functions on a tile: random bits, rounding to fewer bits, 8-bit blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from aida.backends.kernel_scalars import COMPILED

#: rounding.BLOCK
SHARE = tl.constexpr(128)
#: Elements of a row of which one thread adds up the products.
ADJACENT = tl.constexpr(8)

#: Of the random words, as in rounding.py.
ROUNDS = tl.constexpr(7)
MULTIPLIER = tl.constexpr(0xD256D193)
WEYL = tl.constexpr(0x9E3779B9)
STEP = tl.constexpr(0xBB67AE85)
SHARED = tl.constexpr(0x85EBCA6B)
WORD = tl.constexpr(0xFFFFFFFF)

# A float32 times 2**-120 has the bits of an e4m3 number at 20 and above, also those of its subnormal numbers;
# times 2**-112 those of an fp16 number at 13 and above. Then rounding is an addition to the bits below.
TO_E4M3 = tl.constexpr(2.0**-120)
NAN_E4M3 = tl.constexpr(480 * 2.0**-120)
FROM_E4M3 = tl.constexpr(2.0**120)
TO_FLOAT16 = tl.constexpr(2.0**-112)


@triton.jit
def random_words(seed, step, positions):
    """Two uint32 words per position. The positions are uint32, or int64 if one of them needs it; the others int64."""
    low = positions.to(tl.uint32)
    high = tl.zeros_like(low) if positions.dtype == tl.uint32 else (positions >> 32).to(tl.uint32)
    key = seed + step * STEP
    for _ in tl.static_range(ROUNDS):
        product = low.to(tl.uint64) * MULTIPLIER
        low = high ^ (product >> 32).to(tl.uint32) ^ (key & WORD).to(tl.uint32)
        high = product.to(tl.uint32)
        key += WEYL
    return low, high


@triton.jit
def random_word(seed, step, positions):
    """One uint32 word per position. An even position and the next one share a call of the generator."""
    low, high = random_words(seed + SHARED, step, positions >> 1)
    return tl.where(positions & 1 == 0, low, high)


@triton.jit
def rounded(x, bits, dtype: tl.constexpr):
    """float32 rounded to bf16 or fp16 by 16 random bits per element. NaN and infinity stay what they are."""
    raw = x.to(tl.uint32, bitcast=True)
    if dtype == tl.bfloat16:
        # adding to the largest NaN would wrap around
        code = tl.where(x == x, raw + bits, raw) >> 16
    else:
        code = (tl.abs(x) * TO_FLOAT16).to(tl.uint32, bitcast=True) + (bits >> 3) >> 13
        code = tl.where(x == x, tl.minimum(code, 0x7C00), 0x7E00) | (raw >> 16 & 0x8000)
    return code.to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """``x`` rounded to nearest, ties to even."""
    last = x.to(tl.uint32, bitcast=True) >> 16 & 1
    # the interpreter's conversion to bf16 cuts the bits off
    return x.to(dtype) if COMPILED or dtype != tl.bfloat16 else rounded(x, last + 0x7FFF, dtype)


@triton.jit
def block_scales(x):
    """The scale of each row (int32)."""
    raw = x.to(tl.uint32, bitcast=True)
    # twice the magnitude plus one unit of the exponent: only what is not finite wraps around, and is then the smallest
    largest = tl.maximum(tl.max(raw + raw + 0x01000000, 1), 0x01000000) - 0x01000000
    # 448 is 1.75 * 2**8: adding carries into the exponent if the mantissa is above 1.75
    return tl.maximum((largest + 0x3FFFFE >> 24).to(tl.int32) - 8, 1)


@triton.jit
def encode(x, scales, words, LOW: tl.constexpr, NATIVE: tl.constexpr):
    """The e4m3 codes (uint8) of a tile whose rows have these scales.

    They are rounded by 16 bits of each random word: the low ones for signed values, else the high ones.
    """
    inverse = (254 - scales << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.abs(x) * inverse[:, None] * TO_E4M3, NAN_E4M3)  # a NaN is not the minimum
    code = (scaled.to(tl.uint32, bitcast=True) << 4) + _middle(words, LOW, NATIVE)
    if LOW:
        code |= x.to(tl.uint32, bitcast=True) & 0x80000000
    return _top(code, NATIVE)


# Both functions select bytes of words. For that a device that converts e4m3 has one instruction, which the compiler
# does not find: the kernel is limited by the number of its instructions, and these are 5 % of them.


@triton.jit
def _middle(words, LOW: tl.constexpr, NATIVE: tl.constexpr):
    """The low or the high 16 bits of each word, as its bits 8 to 23."""
    if NATIVE:
        select: tl.constexpr = "prmt.b32 $0, $1, 0, 0x4104;" if LOW else "prmt.b32 $0, $1, 0, 0x4324;"
        return tl.inline_asm_elementwise(select, "=r,r", [words], tl.uint32, is_pure=True, pack=1)
    return (words << 8 if LOW else words >> 8) & 0xFFFF00


@triton.jit
def _top(words, NATIVE: tl.constexpr):
    """The highest byte of each word (uint8)."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, b; prmt.b32 a, $1, $2, 0x73; prmt.b32 b, $3, $4, 0x73; prmt.b32 $0, a, b, 0x5410;}",
            "=r,r,r,r,r", [words], tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    return (words >> 24).to(tl.uint8)


@triton.jit
def decode(codes, scales, NATIVE: tl.constexpr):
    """The float32 values of a tile of codes. NATIVE: the device converts e4m3 itself."""
    if NATIVE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.uint32)
        values = ((wide & 0x80) << 24 | (wide & 0x7F) << 20).to(tl.float32, bitcast=True) * FROM_E4M3
        values = tl.where((wide & 0x7F) == 0x7F, float("nan"), values)
    return values * (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]
