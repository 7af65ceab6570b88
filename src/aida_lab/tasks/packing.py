"""Sequence packing: place several sentence pairs into one row.

Batches of random sentences are more than half padding (Multi30k: 14 words on average, 48 at most). Packed rows need
little padding, and their shapes rarely change, so that a CUDA graph can be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """The start of a pair: its row, and its first column in the source and in the target."""

    row: int
    source: int
    target: int


def first_fit(lengths: Sequence[tuple[int, int]], width: int) -> list[Place]:
    """A place for every pair of (source, target) lengths, in rows of ``width`` tokens per side.

    First-fit decreasing: longest pairs first, each into the first row with space for both sides. 200 pairs of Multi30k
    need two rows of 64 more than the minimum. The host takes a millisecond, while a GPU is busy with earlier steps.
    """
    places = [Place(0, 0, 0)] * len(lengths)
    left: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: (max(lengths[each]), sum(lengths[each])), reverse=True):
        source, target = lengths[index]
        row = next((row for row, (a, b) in enumerate(left) if source <= a and target <= b), len(left))
        if row == len(left):
            left.append((width, width))
        a, b = left[row]
        places[index] = Place(row, width - a, width - b)
        left[row] = a - source, b - target
    return places


def cells(starts: Tensor, lengths: Tensor, numbers: Tensor, length: int, shape: tuple[int, int], empty: int) -> Tensor:
    """Indices ``shape`` into a flattened grid with rows of ``length``: the token that each place reads.

    Sentence i starts at flat place ``starts[i]`` and is row ``numbers[i]`` of the grid. Other places read ``empty``.
    """
    found = torch.full((shape[0] * shape[1],), empty)
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    found[starts.repeat_interleave(lengths) + within] = (numbers * length).repeat_interleave(lengths) + within
    return found.view(shape)
