"""From the state of an optimizer to a few numbers a layer: first on the device, then on the host.

Launching an operation costs a GPU's host more than a small layer's arithmetic, so layers of one shape
are read together, one row each: benchmarks/probe_cost.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from aida.readings import Reading
from aida.stepsizes import histogram
from aida.stepsizes import pieces as tensor_pieces
from aida.stepsizes.pieces import HostCopy, Slot, own_shard, pieces
from aida.stepsizes.scales import ScaleReader

#: A stepsize counts as being at its bound from this share of it on.
AT_BOUND = 0.99


@dataclass(frozen=True)
class Layer:
    """One parameter tensor of the optimizer."""

    name: str
    param: Tensor
    index: int  #: of its group
    group: dict[str, Any]
    step: float  #: its own counter


@dataclass(frozen=True)
class Statistics:
    """What the stepsizes of one layer come to."""

    elements: int
    mean: float
    std: float
    min: float
    max: float
    quantiles: tuple[tuple[float, float], ...]
    bound: float | None
    at_bound: float | None


@dataclass(frozen=True)
class _Piece:
    """Statistics of the same stretch of several layers, one number a layer, on their way to the host."""

    size: int
    mean: Slot
    variance: Slot
    smallest: Slot
    largest: Slot
    at_bound: Slot | None


class Block:
    """Layers that are alike and read together. Made on the device; :meth:`statistics` are read on the host."""

    def __init__(
        self, layers: Sequence[Layer], optimizer: Optimizer, reading: Reading, levels: Sequence[float], copy: HostCopy
    ) -> None:
        self.layers = layers
        self._group = layers[0].group
        self._reading, self._levels, self._copy = reading, levels, copy
        self._bound = reading.bound(self._group)
        self._state = [optimizer.state[layer.param] for layer in layers]
        self._pieces: list[_Piece] = []
        self._ranks: list[int] = []
        self._places: Slot | None = None

    def read(self, scales: ScaleReader | None) -> None:
        """Enqueue the statistics; nothing here waits for the device."""
        assert self._reading.stepsize is not None
        keys = self._reading.keys(self._group)
        params = [layer.param for layer in self.layers]
        columns = [[state[key] for state in self._state] for key in keys]
        if scales is not None:
            columns += scales.columns(params, self._group)
        step = torch.tensor(self.layers[0].step, dtype=torch.float64)  # on the host: no launch for a number
        counts: Tensor | None = None
        for rows in _rows(columns):
            stepsize = self._reading.stepsize(rows[: len(keys)], step, self._group)
            self._pieces.append(self._piece(stepsize))
            if self._levels:
                found = histogram.count(stepsize)
                counts = found if counts is None else counts.add_(found)
            if scales is not None and len(rows) > len(keys):
                scales.take(params, rows[len(keys) :], stepsize, self.layers[0].step, self._group)
        if counts is not None:
            last = sum(piece.size for piece in self._pieces) - 1
            self._ranks = [math.floor(level * last) for level in self._levels]
            self._places = self._copy.add_counts(counts, self._ranks)

    def statistics(self, row: int) -> Statistics:
        """Those of one layer, after the copy came to the host."""
        elements, mean, squares = 0, 0.0, 0.0
        for piece in self._pieces:
            # Chan's update: a difference of squares would lose the small variances that matter here
            off = piece.mean.values[row] - mean
            squares += piece.size * (piece.variance.values[row] + off**2 * elements / (elements + piece.size))
            elements += piece.size
            mean += off * piece.size / elements
        smallest = min(piece.smallest.values[row] for piece in self._pieces)
        largest = max(piece.largest.values[row] for piece in self._pieces)
        at_bound = None
        if self._bound is not None:
            at_bound = sum(piece.at_bound.values[row] for piece in self._pieces if piece.at_bound) / elements
        return Statistics(
            elements=elements,
            mean=mean,
            std=math.sqrt(squares / elements),
            min=smallest,
            max=largest,
            quantiles=tuple(self._quantiles(row, smallest, largest)),
            bound=self._bound,
            at_bound=at_bound,
        )

    def _quantiles(self, row: int, smallest: float, largest: float) -> Iterator[tuple[float, float]]:
        if self._places is None:
            return
        start = 3 * len(self._ranks) * row
        for level, rank in zip(self._levels, self._ranks, strict=True):
            yield level, histogram.value_at(rank, self._places.values[start : start + 3], smallest, largest)
            start += 3

    def _piece(self, stepsize: Tensor) -> _Piece:
        variance, mean = torch.var_mean(stepsize, dim=1, correction=0)
        smallest, largest = torch.aminmax(stepsize, dim=1)
        add = self._copy.add
        return _Piece(
            size=stepsize.shape[1],
            mean=add(mean),
            variance=add(variance),
            smallest=add(smallest),
            largest=add(largest),
            at_bound=None if self._bound is None else add((stepsize >= AT_BOUND * self._bound).sum(dim=1)),
        )


def blocks(
    layers: Sequence[Layer], optimizer: Optimizer, reading: Reading, levels: Sequence[float], copy: HostCopy
) -> list[Block]:
    """The layers in blocks of those that are alike, no block larger than a piece unless it is a single layer."""
    alike: dict[Any, list[Layer]] = {}
    for layer in layers:
        alike.setdefault(_likeness(layer), []).append(layer)
    found: list[list[Layer]] = []
    for same in alike.values():
        together = max(1, tensor_pieces.PIECE // own_shard(same[0].param).numel())
        found += [same[start : start + together] for start in range(0, len(same), together)]
    return [Block(same, optimizer, reading, levels, copy) for same in found]


def _likeness(layer: Layer) -> Any:
    p = own_shard(layer.param)
    if p.device.type in tensor_pieces.HOSTS:
        return id(layer)
    grad = None if layer.param.grad is None else layer.param.grad.dtype
    return layer.index, layer.step, p.shape, p.dtype, p.device, grad


def _rows(columns: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """One layer's tensors piece by piece, or those of several layers at once, stacked."""
    if len(columns[0]) == 1:
        for piece in pieces(*(column[0] for column in columns)):
            yield [part.unsqueeze(0) for part in piece]
        return
    stacked = [torch.stack(list(map(own_shard, column))) for column in columns]
    yield [(torch.view_as_real(t) if t.is_complex() else t).reshape(len(t), -1) for t in stacked]
