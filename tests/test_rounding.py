"""Rounding to few bits: the random bits, their independence, exact means, and formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aida.rounding import BLOCK, HALF, block_scales, decode, encode, random_word, random_words, to_bfloat16, to_float16

#: Of the authors of Philox: counter (two words), key, and the two words of the result after 7 rounds.
KNOWN = [
    ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
    ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
]


def values(count: int = 4 * BLOCK + 37, seed: int = 0) -> Tensor:
    """Numbers of many magnitudes, also within a block."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * 10.0 ** torch.empty(count).uniform_(-7, 3, generator=generator)


def bits_of(count: int, step: int) -> Tensor:
    return random_words(0, torch.tensor(float(step)), torch.arange(count))[0] & 0xFFFF


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_random_words_are_those_of_philox(counter: tuple[int, int], key: int, words: tuple[int, int]) -> None:
    position = counter[1] << 32 | counter[0]
    position -= (position >> 63) << 64  # as a signed number
    found = random_words(key, torch.tensor(0.0), torch.tensor([position]))
    assert tuple(int(word) for word in found) == words


def test_the_bits_of_seeds_steps_and_neighbours_are_not_correlated() -> None:
    count = 1 << 16
    positions = torch.arange(count)
    streams = [random_words(seed, torch.tensor(step), positions)[0] for seed, step in ((0, 1.0), (0, 2.0), (1, 1.0))]
    streams += [random_words(0, torch.tensor(1.0), positions)[1], random_words(0, torch.tensor(1.0), positions + 1)[0]]
    streams += [random_word(0, torch.tensor(1.0), positions + start) for start in (0, 1)]
    streams.append(random_words(0, torch.tensor(1.0), positions >> 1)[0])
    correlations = torch.corrcoef(torch.stack(streams).double()) - torch.eye(len(streams))
    assert correlations.abs().max() < 5 / math.sqrt(count)


ROUNDINGS = {"bf16": to_bfloat16, "fp16": to_float16}


def assert_unbiased(found: Tensor, x: Tensor, unit: Tensor) -> None:
    """Rows of roundings of x, whose mean must be within five standard errors; ``unit`` is one in the last place."""
    share = x.double().abs() / unit % 1  # of the steps that round away from zero
    # 16 bits resolve a unit into 65536 parts; the last term is for events that are expected once or never
    allowed = 5 * (share * (1 - share) / len(found)).sqrt() + 1 / 65536 + 5 / len(found)
    assert ((found.double().mean(0) - x).abs() <= unit * allowed).all()


def unit_of(x: Tensor, mantissa: int, least: int) -> Tensor:
    return 2.0 ** (x.double().abs().log2().floor().clamp(min=least) - mantissa)


@pytest.mark.parametrize(("name", "mantissa", "least"), [("bf16", 7, -126), ("fp16", 10, -14)])
def test_the_mean_of_many_stochastic_roundings_is_the_number(name: str, mantissa: int, least: int) -> None:
    x = values(256).clamp(-6e4, 6e4)
    found = torch.stack([ROUNDINGS[name](x, bits_of(len(x), step)) for step in range(2000)])
    assert_unbiased(found, x, unit_of(x, mantissa, least))


def test_the_mean_of_many_blocks_is_the_block() -> None:
    x = values(2 * BLOCK)
    scales = block_scales(x)
    found = torch.stack([decode(encode(x, scales, bits_of(len(x), step)), scales) for step in range(2000)])
    powers = 2.0 ** (scales.double() - 127).repeat_interleave(BLOCK)
    assert_unbiased(found, x, unit_of(x / powers, 3, -6) * powers)


def test_rounding_to_nearest_is_torchs() -> None:
    x = values()
    assert torch.equal(to_bfloat16(x, HALF), x.bfloat16())
    assert torch.equal(to_float16(x, HALF), x.half())
    scales = block_scales(x)
    powers = 2.0 ** (scales.double() - 127).repeat_interleave(BLOCK)[: len(x)]
    assert torch.equal(
        decode(encode(x, scales, HALF), scales), ((x / powers).to(torch.float8_e4m3fn).float() * powers).float()
    )


@pytest.mark.parametrize("bits", [0, HALF, 65535])
def test_what_needs_no_rounding_is_not_changed(bits: int) -> None:
    x = values()
    assert torch.equal(to_bfloat16(x.bfloat16().float(), bits), x.bfloat16())
    assert torch.equal(to_float16(x.half().float(), bits), x.half())
    scales = block_scales(x)
    stored = decode(encode(x, scales, HALF), scales)
    again = block_scales(stored)
    assert torch.equal(decode(encode(stored, again, bits), again), stored)


def test_a_block_uses_its_range_and_nothing_overflows() -> None:
    for largest in (1.75, 1.7500001, 448.0, 449.0, 3e38, 1e-30):
        x = torch.linspace(-1, 1, BLOCK) * largest
        scales = block_scales(x)
        found = decode(encode(x, scales, 65535), scales)
        assert found.isfinite().all()
        assert 224 < largest / 2.0 ** (int(scales[0]) - 127) <= 448


def test_numbers_that_are_not_finite_stay_so_and_do_not_scale_their_block() -> None:
    x = torch.ones(BLOCK)
    x[3], x[5] = float("nan"), float("-inf")
    scales = block_scales(x)
    found = decode(encode(x, scales, HALF), scales)
    assert found[[3, 5]].isnan().all()
    assert torch.equal(found[6:], x[6:])
    for narrow in ROUNDINGS.values():
        assert narrow(x, 65535)[3].isnan()
        assert narrow(x, 65535)[5] == float("-inf")
