"""Sentence pairs side by side in rows: which pair goes where, and where each word is then read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a pair begins: its row, and its first place there on either side."""

    row: int
    source: int
    target: int


def first_fit(lengths: Sequence[tuple[int, int]], width: int) -> list[Place]:
    """A place for every pair of (source, target) lengths, in rows of ``width`` on either side.

    The longest come first, each into the first row with room for both of its sides. 200 pairs of Multi30k then need two
    rows of 64 more than their words would fill, and the host a millisecond, which it has while a GPU is at other steps.
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
    """For each place of ``shape`` the cell that is read there, of a grid with rows of ``length``.

    Sentence i begins at the place ``starts[i]``, counted through all rows, and is row ``numbers[i]`` of the grid; a
    place without a word reads ``empty``.
    """
    found = torch.full((shape[0] * shape[1],), empty)
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    found[starts.repeat_interleave(lengths) + within] = (numbers * length).repeat_interleave(lengths) + within
    return found.view(shape)
