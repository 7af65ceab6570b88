"""From the state of an optimizer to a few numbers per layer: first on the device, then on the host.

On a GPU a launch takes longer than the arithmetic of a small layer. So layers are concatenated and read together,
and layers of the same size are reduced together, one row each. The host then processes all layers at once:
benchmarks/probe_cost.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aida._step.hyper import from_group
from aida.readings import Reading
from aida.stepsizes import _histogram as histogram
from aida.stepsizes._pieces import HostCopy, Layer, Slot, blocks, by_size, stretches
from aida.stepsizes._scales import ScaleReader

#: A stepsize of at least this share of its bound counts as being at the bound.
AT_BOUND = 0.99


class Reader:
    """Enqueues the computations of some layers. Call :meth:`statistics` after the copy is fetched."""

    def __init__(
        self,
        layers: Sequence[Layer],
        reading: Reading,
        levels: Sequence[float],
        copy: HostCopy,
        scales: ScaleReader | None,
    ) -> None:
        self._layers, self._reading, self._levels, self._copy = layers, reading, levels, copy
        self._elements = torch.tensor([float(layer.size) for layer in layers], dtype=torch.float64)
        # the order statistics of the levels: (layers, levels)
        self._ranks = torch.outer(self._elements - 1, torch.tensor(levels, dtype=torch.float64)).long()
        self._bounds = [reading.bound(layer.group) for layer in layers]
        # the pieces that were read: layer and size of each, and slots of their mean, variance, smallest and largest
        # value, and number of elements at the bound
        self._owners: list[int] = []
        self._sizes: list[float] = []
        self._slots: list[tuple[Slot, ...]] = []
        # their norms of weights and of updates and, in low precision, the number of updates that are lost
        self._updates: list[tuple[Sequence[int], list[Slot]]] = []
        tables: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
        for block in blocks(layers):
            counts = self._read(block, scales)
            if counts:
                owners, known = tables.setdefault(counts[0].device, ([], []))
                owners += block
                known += counts
        self._places = [
            (owners, copy.add(histogram.locate(known, self._ranks[owners]).flatten()))
            for owners, known in tables.values()
        ]

    def statistics(self) -> list[dict[str, Any]]:
        """The statistics of each layer, by the name of their field in a record."""
        if not self._layers:
            return []
        means, variances, lows, highs, reached = (
            torch.cat([slot.values for slot in slots]) for slots in zip(*self._slots, strict=True)
        )
        owners, sizes = torch.tensor(self._owners), torch.tensor(self._sizes, dtype=torch.float64)

        def share(numbers: Tensor) -> Tensor:
            """Sum over the pieces of each layer, divided by the layer's number of elements."""
            return torch.zeros_like(self._elements).index_add_(0, owners, numbers) / self._elements

        mean = share(sizes * means)
        # around the mean of the whole layer: a difference of squares would lose small variances, which matter here
        std = share(sizes * (variances + (means - mean[owners]) ** 2)).sqrt()
        smallest = torch.full_like(mean, math.inf).scatter_reduce_(0, owners, lows, "amin")
        largest = torch.full_like(mean, -math.inf).scatter_reduce_(0, owners, highs, "amax")
        shares = zip(self._bounds, share(reached).tolist(), strict=True)
        columns = {
            "mean": mean.tolist(), "std": std.tolist(), "min": smallest.tolist(), "max": largest.tolist(),
            "quantiles": self._quantiles(smallest, largest), "bound": self._bounds,
            "at_bound": [None if bound is None else found for bound, found in shares],
        }  # fmt: skip
        found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        for number, (weights, updates, *lost) in self._sums().items():
            found[number] |= {"weight_norm": math.sqrt(weights), "update_norm": math.sqrt(updates)}
            if lost:
                found[number]["lost"] = lost[0] / self._layers[number].size
        return found

    def _sums(self) -> dict[int, list[float]]:
        """Of each layer whose update is known: squared norms of weights and update, and number of lost updates."""
        found: dict[int, list[float]] = {}
        for block, slots in self._updates:
            for number, weights, updates, *lost in zip(block, *(slot.values.tolist() for slot in slots), strict=True):
                more = [weights * weights, updates * updates, *lost]
                found[number] = [a + b for a, b in zip(found.get(number, [0.0] * len(more)), more, strict=True)]
        return found

    def _read(self, block: Sequence[int], scales: ScaleReader | None) -> list[Tensor]:
        """Enqueue the statistics of one of :func:`blocks`, and return its histograms."""
        assert self._reading.stepsize is not None
        layers = [self._layers[number] for number in block]
        group = layers[0].group
        keys = self._reading.keys(group)
        columns = [[layer.state[key] for layer in layers] for key in keys]
        momentum = self._reading.momentum
        if momentum is not None and momentum in layers[0].state and "betas" in group:
            columns += [[layer.state[momentum] for layer in layers], [layer.param.resolve_conj() for layer in layers]]
            rate = group["lr"] / (1 - group["betas"][0] ** layers[0].step)
            if isinstance(rate, Tensor):
                rate = rate.reshape(()).to(layers[0].param.device, non_blocking=True)
            if scales is not None and (gradients := scales.gradients(layers)):
                columns.append(gradients)
        step = torch.tensor(layers[0].step, dtype=torch.float64)  # on the host: a number needs no launch
        counts: list[Tensor] = []
        for flat in stretches(columns):
            moments = [t.float() if t.dtype == torch.bfloat16 else t for t in flat[: len(keys)]]
            stepsize = self._reading.stepsize(moments, step, group)
            sizes = [len(stepsize)] if len(block) == 1 else [layer.size for layer in layers]
            self._add_piece(stepsize, block, sizes)
            if self._levels:
                found = histogram.count(stepsize, sizes)
                counts = [table.add_(more) for table, more in zip(counts, found, strict=True)] if counts else found
            if len(flat) > len(keys):
                m, p, *gradient = flat[len(keys) :]
                update = (m.to(torch.promote_types(m.dtype, torch.float32)) * stepsize).mul_(rate)
                self._add_update(block, sizes, p, update)
                if scales is not None and gradient:
                    scales.take(block, sizes, from_group(group), m, p, gradient[0], update)
        return counts

    def _add_update(self, block: Sequence[int], sizes: Sequence[int], p: Tensor, update: Tensor) -> None:
        each = [p, update]
        if p.dtype.itemsize < 4 and not self._keeps_updates(block):
            each.append((p.to(update.dtype) - update).to(p.dtype).eq(p).logical_and_(update != 0))
        norm = partial(torch.linalg.vector_norm, dim=1, dtype=update.dtype)
        found = [(norm(ps), norm(us), *(n.sum(dim=1) for n in lost)) for ps, us, *lost in by_size(sizes, *each)]
        self._updates.append((block, [self._copy.add(*numbers) for numbers in zip(*found, strict=True)]))

    def _keeps_updates(self, block: Sequence[int]) -> bool:
        """Whether the parameters are rounded in a way that loses no update."""
        group = self._layers[block[0]].group
        return bool(group.get("stochastic_rounding") or group.get("kahan_sum"))

    def _add_piece(self, stepsize: Tensor, block: Sequence[int], sizes: Sequence[int]) -> None:
        bound = self._bounds[block[0]]
        threshold = math.inf if bound is None else AT_BOUND * bound
        found = []
        for rows, reached in by_size(sizes, stepsize, stepsize >= threshold):
            variance, mean = torch.var_mean(rows, dim=1, correction=0)
            smallest, largest = torch.aminmax(rows, dim=1)
            found.append((mean, variance, smallest, largest, reached.sum(dim=1)))
        self._owners += block
        self._sizes += map(float, sizes)
        self._slots.append(tuple(self._copy.add(*numbers) for numbers in zip(*found, strict=True)))

    def _quantiles(self, smallest: Tensor, largest: Tensor) -> list[tuple[tuple[float, float], ...]]:
        places = torch.zeros(*self._ranks.shape, 3, dtype=torch.float64)
        for owners, slot in self._places:
            places[owners] = slot.values.view(-1, *places.shape[1:])
        values = histogram.values_at(self._ranks, places, smallest, largest)
        return [tuple(zip(self._levels, mine, strict=True)) for mine in values.tolist()]
