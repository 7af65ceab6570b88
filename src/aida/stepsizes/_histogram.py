"""Quantiles of tensors that are read in pieces, without sorting or synchronizing.

Positive float32 numbers have the same order as their bits, so the leading bits number bins of equal width within
each power of two. Counting takes one pass. A quantile from these bins is in the bin of its order statistic, and
differs from it by at most :data:`RELATIVE_ERROR`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: Bins per power of two, for the powers from 2**FIRST to 2**(FIRST + POWERS).
PER_POWER = 64
FIRST, POWERS = -64, 128
BINS = PER_POWER * POWERS

#: Width of a bin relative to its lower edge, at most. Values outside the range are counted in the outermost bins.
RELATIVE_ERROR = 1 / PER_POWER

_SHIFT = 23 - int(math.log2(PER_POWER))
_OFFSET = (127 + FIRST) * PER_POWER

#: Histograms that are searched at a time: 512 of them are as large as a piece.
_TOGETHER = 512

#: From this many values on, all of which may be in one bin, counting in shared memory is faster.
_LONG = 1 << 16


def count(values: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Count the values (none negative) of each layer per bin.

    ``values`` holds layers of these sizes one after another, the largest first. The integer histograms are
    returned in the same order, one or several per 1-dim tensor.
    """
    bins = (values.float().view(torch.int32) >> _SHIFT).clamp_(_OFFSET, _OFFSET + BINS - 1)
    if bins.device.type == "cuda":
        long = len(sizes) if len(sizes) == 1 else sum(size >= _LONG for size in sizes)
        *apart, rest = bins.split([*sizes[:long], sum(sizes[long:])])
        tables = [torch.histc(layer, bins=BINS, min=_OFFSET, max=_OFFSET + BINS) for layer in apart]
        return [*tables, _count_together(rest, sizes[long:])] if len(rest) else tables
    return [_count_together(bins, sizes)]


def _count_together(bins: Tensor, sizes: Sequence[int]) -> Tensor:
    # bins are numbered consecutively over all layers
    starts = torch.arange(-_OFFSET, len(sizes) * BINS - _OFFSET, BINS, dtype=torch.int32, device=bins.device)
    if len(sizes) > 1:
        lengths = torch.tensor(sizes).to(bins.device, non_blocking=True)
        starts = starts.repeat_interleave(lengths, output_size=len(bins))
    places = bins.add_(starts)
    if bins.device.type == "cpu":  # on a device bincount synchronizes to find the largest value
        return torch.bincount(places, minlength=len(sizes) * BINS)
    counts = torch.zeros(len(sizes) * BINS, dtype=torch.int32, device=bins.device)
    return counts.scatter_add_(0, places.long(), torch.ones_like(places))


def locate(tables: Sequence[Tensor], ranks: Tensor) -> Tensor:
    """Find each layer's ranks (layers, ranks; 0 is the smallest value) in its histogram: (layers, ranks, 3).

    The three numbers are the bin, the number of values below it and the number of values in it. On the host
    :func:`values_at` converts them to values.
    """
    found = []
    counts = torch.cat(list(tables)).view(-1, BINS)
    wanted = ranks.to(counts.device, non_blocking=True)
    for some, places in zip(counts.split(_TOGETHER), wanted.split(_TOGETHER), strict=True):
        below = some.cumsum(dim=1, dtype=torch.int64)
        bins = torch.searchsorted(below, places, right=True).clamp_(max=BINS - 1)
        inside = some.gather(1, bins).long()
        found.append(torch.stack([bins, below.gather(1, bins) - inside, inside], dim=-1))
    return torch.cat(found)


def values_at(ranks: Tensor, places: Tensor, smallest: Tensor, largest: Tensor) -> Tensor:
    """The values of the ranks, interpolated within their bins and clamped to the values seen: (layers, ranks)."""
    bins, below, inside = places.double().unbind(-1)
    share = torch.where(inside > 0, (ranks - below + 0.5) / inside, 0.5)
    power = torch.floor(bins / PER_POWER)
    values = torch.ldexp(1 + (bins - power * PER_POWER + share) / PER_POWER, power + FIRST)
    return values.clamp(smallest.unsqueeze(1), largest.unsqueeze(1))
