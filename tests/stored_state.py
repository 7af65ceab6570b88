"""Algorithm 1 in float64 with state and weights rounded as documented, independent of the package.

Random bits are computed with Python's integers, and formats from their definition: a float with so many bits after the
point of its mantissa, and a smallest exponent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from transcription import Transcription, Vector

BLOCK = 128
Bits = NDArray[np.int64]


def philox(low: int, high: int, key: int) -> tuple[int, int]:
    """Philox2x32 with 7 rounds, as its authors define it."""
    for _ in range(7):
        high_product, low_product = divmod(low * 0xD256D193, 1 << 32)
        low, high = high_product ^ key ^ high, low_product
        key = (key + 0x9E3779B9) % (1 << 32)
    return low, high


def words(seed: int, step: int, parameter: int, count: int, shared: bool) -> tuple[Bits, Bits, Bits]:
    """16 bits per element for each of m, the second moment and the weights.

    ``shared``: the weights need none, so that one call of the generator serves two neighbours.
    """
    key = (seed + step * 0xBB67AE85 + shared * 0x85EBCA6B) % (1 << 32)
    counters = [((parameter << 40) + i) >> shared for i in range(count)]
    pairs = [philox(counter % (1 << 32), counter >> 32, key) for counter in counters]
    first, second = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    if shared:
        first = np.where(np.arange(count) % 2, second, first)
    return first % (1 << 16), first >> 16, second % (1 << 16)


def rounded(x: Vector, bits: Bits | None, mantissa: int, least: int) -> Vector:
    """x rounded down or up to a float with this mantissa and smallest exponent; to nearest if there are no bits."""
    exponent = np.maximum(np.frexp(np.abs(x))[1] - 1, least)
    unit = np.ldexp(1.0, exponent - mantissa)
    if bits is None:
        return np.rint(x / unit) * unit
    below = np.floor(np.abs(x) / unit)
    up = np.abs(x) / unit - below + bits / 65536 >= 1
    return np.copysign((below + up) * unit, x)


def bf16(x: Vector, bits: Bits | None) -> Vector:
    return rounded(x, bits, 7, -126)


def fp16(x: Vector, bits: Bits | None) -> Vector:
    return rounded(x, bits, 10, -14)


def fp8(x: Vector, bits: Bits) -> Vector:
    """e4m3 in blocks of 128, each with the smallest power of two as its scale that keeps it within 448."""
    found = np.empty_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        largest = np.abs(block).max()
        scale = 2.0 ** np.ceil(np.log2(largest / 448)) if largest else 1.0
        found[start : start + BLOCK] = rounded(block / scale, bits[start : start + BLOCK], 3, -6) * scale
    return found


@dataclass
class Stored(Transcription):
    """One layer whose moments and weights are rounded after every step."""

    state: str = "float32"
    rounding: str = "nearest"
    weights: str = "float32"
    seed: int = 0
    parameter: int = 0
    compensation: Vector = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compensation = np.zeros_like(self.theta)

    def step(self, g: Vector) -> None:
        stored = self.theta
        self.theta = self.theta + self.compensation
        super().step(g)
        shared = self.rounding != "stochastic"
        for_m, for_v, for_p = words(self.seed, self.t, self.parameter, len(self.theta), shared)
        if self.state == "bfloat16":
            self.m, self.v = bf16(self.m, for_m), bf16(self.v, for_v)
        elif self.state == "fp8":
            beta2 = self.betas[1]
            share = self.eps * (1 - beta2**self.t) / (1 - beta2)
            self.m = fp8(self.m, for_m)
            self.v = fp8(np.sqrt(np.maximum(self.v - share, 0)), for_v) ** 2 + share
        if self.weights == "float32":
            return
        narrow = bf16 if self.weights == "bfloat16" else fp16
        exact = self.theta
        self.theta = narrow(exact, None if shared else for_p)
        if self.rounding == "kahan":
            self.theta = np.where(np.abs(exact - stored) <= np.abs(exact - self.theta), stored, self.theta)
            self.compensation = narrow(exact - self.theta, None)
