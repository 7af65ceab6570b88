"""Quantiles of tensors that are seen in pieces, without sorting them and without waiting for their device.

Positive float32 numbers are ordered like their bits, so the bits above some position number bins of
equal width within each power of two. Counting them takes one pass. A quantile found this way lies in
the bin of the order statistic it stands for, and is off by at most :data:`RELATIVE_ERROR` of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: Bins in each power of two, and the powers from 2**FIRST to 2**(FIRST + POWERS) that have bins of their own.
PER_POWER = 64
FIRST, POWERS = -64, 128
BINS = PER_POWER * POWERS

#: A bin is at most this much wider than its lower edge. Values beyond the range share the outermost bins.
RELATIVE_ERROR = 1 / PER_POWER

_SHIFT = 23 - int(math.log2(PER_POWER))
_OFFSET = (127 + FIRST) * PER_POWER
#: The largest float32 below 2**(FIRST + POWERS).
_LARGEST = math.ldexp(1.0, FIRST + POWERS) * (1 - 2.0**-24)

#: Histograms that are searched at once: 64 of them hold 4 MiB.
_TOGETHER = 64

#: From rows of this length on, all of whose values may fall into one bin, adding in shared memory pays.
_LONG = 1 << 16


def count(rows: Tensor) -> Tensor:
    """How many of each row's values (none of them negative) lie in each bin: integers, (rows, BINS)."""
    inside = rows.float().clamp(math.ldexp(1.0, FIRST), _LARGEST)
    bins = inside.view(torch.int32) >> _SHIFT
    if bins.device.type == "cuda" and (len(rows) == 1 or rows.shape[1] >= _LONG):
        return torch.stack([torch.histc(row, bins=BINS, min=_OFFSET, max=_OFFSET + BINS) for row in bins])
    # the bins of one row follow those of the row before
    starts = torch.arange(-_OFFSET, len(rows) * BINS - _OFFSET, BINS, dtype=torch.int32, device=rows.device)
    flat = bins.add_(starts.unsqueeze(1)).flatten()
    if bins.device.type == "cpu":  # elsewhere it would wait for the largest value
        return torch.bincount(flat, minlength=len(rows) * BINS).view(-1, BINS)
    counts = torch.zeros(len(rows) * BINS, dtype=torch.int32, device=rows.device)
    return counts.scatter_add_(0, flat.long(), torch.ones_like(flat)).view(-1, BINS)


def locate(tables: Sequence[Tensor], ranks: Sequence[Sequence[int]]) -> Tensor:
    """For every row of every table, the places of the table's ranks (0 is the smallest value): (rows, ranks, 3).

    The three numbers are the bin, how many values lie below it and how many in it; :func:`value_at`
    makes a value of them once they are on the host.
    """
    found = []
    start = 0
    while start < len(tables):
        stop, rows = start + 1, len(tables[start])
        while stop < len(tables) and rows + len(tables[stop]) <= _TOGETHER:
            rows += len(tables[stop])
            stop += 1
        table = torch.cat(list(tables[start:stop]))
        mine = zip(tables[start:stop], ranks[start:stop], strict=True)
        wanted = [list(wanted) for counts, wanted in mine for _ in range(len(counts))]
        below = table.cumsum(dim=1, dtype=torch.int64)
        places = torch.tensor(wanted, dtype=torch.int64).to(table.device, non_blocking=True)
        bins = torch.searchsorted(below, places, right=True).clamp_(max=BINS - 1)
        inside = table.gather(1, bins).long()
        found.append(torch.stack([bins, below.gather(1, bins) - inside, inside], dim=-1))
        start = stop
    return torch.cat(found)


def value_at(rank: int, place: Sequence[float], smallest: float, largest: float) -> float:
    """The value of a rank, its bin filled evenly, and never outside of what was seen."""
    index, below, inside = place
    power, part = divmod(int(index), PER_POWER)
    share = (rank - below + 0.5) / inside if inside else 0.5
    return min(max(math.ldexp(1 + (part + share) / PER_POWER, FIRST + power), smallest), largest)


def edge(index: int) -> float:
    """The lower edge of a bin."""
    power, part = divmod(index, PER_POWER)
    return math.ldexp(1 + part / PER_POWER, FIRST + power)
