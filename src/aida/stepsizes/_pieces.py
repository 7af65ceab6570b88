"""Layers, read together if small and in pieces if large, and all their numbers in one copy to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aida.backends import scalar_dtype
from aida.backends.tables import is_dense

#: Devices without kernel launches, on which reading a number does not synchronize.
HOSTS = ("cpu",)

#: Maximum number of elements in a piece, and so in every temporary: 16 MiB of float32.
PIECE = 1 << 22


class Layer(NamedTuple):
    """One layer of the optimizer: a parameter, or a part of one. Its tensors are those on this rank."""

    name: str
    shape: tuple[int, ...]  #: on all ranks
    param: Tensor
    grad: Tensor | None  #: None too if other ranks have parts of the layer
    size: int  #: elements on this rank; complex elements count as two
    state: Mapping[str, Any]
    group_index: int
    group: dict[str, Any]
    step: float  #: its own counter


def blocks(layers: Sequence[Layer]) -> list[list[int]]:
    """Group the numbers of layers that are read together: similar ones, up to the size of a piece.

    The largest come first, so that layers of the same size and shape are adjacent.
    """
    alike: dict[Any, list[int]] = {}
    for number, layer in enumerate(layers):
        p = layer.param
        grad = None if layer.grad is None else layer.grad.dtype
        alike.setdefault((p.device, layer.group_index, layer.step, type(p), p.dtype, grad), []).append(number)
    found: list[list[int]] = []
    for (device, *_), same in alike.items():
        if device.type in HOSTS:
            found += [[number] for number in same]
            continue
        room = 0
        for number in sorted(same, key=lambda number: (-layers[number].size, layers[number].param.shape)):
            if layers[number].size > room:
                found.append([])
                room = PIECE
            found[-1].append(number)
            room -= layers[number].size
    return found


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same part of every tensor (all of one shape), real and 1-dim.

    Complex tensors are viewed as pairs of reals. Parts are views if all tensors have the same memory order, and
    copies of a few rows otherwise.
    """
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    first = real[0]
    if all(t.is_contiguous() for t in real):
        flat = [t.view(-1) for t in real]
    elif all(_order(t) == _order(first) and is_dense(t) for t in real):
        flat = [t.as_strided((t.numel(),), (1,)) for t in real]
    else:
        rows = max(1, PIECE * first.shape[0] // max(1, first.numel()))
        for parts in zip(*(t.split(rows) for t in real), strict=True):
            yield tuple(part.reshape(-1) for part in parts)
        return
    # operations that change nothing would be a quarter of the time of many small layers on a CPU
    yield from [tuple(flat)] if first.numel() <= PIECE else zip(*(t.split(PIECE) for t in flat), strict=True)


def stretches(columns: Sequence[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
    """Yield each column flat: a single layer piece by piece, several layers concatenated.

    A column holds one tensor per layer. All tensors of a layer have the same shape.
    """
    if len(columns[0]) == 1:
        yield from pieces(*(column[0] for column in columns))
        return
    yield [_laid_out(column) for column in columns]


def _laid_out(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of several tensors, concatenated."""
    parts = []
    # stacking tensors of one shape is one operation; flattening them would be one per tensor
    for _, alike in groupby(tensors, attrgetter("shape")):
        one, *more = alike
        together = torch.stack([one, *more]) if more else one
        parts.append((torch.view_as_real(together) if together.is_complex() else together).reshape(-1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def by_size(sizes: Sequence[int], *flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split concatenated layers of these sizes: per run of equal sizes one matrix of each tensor, one row per layer."""
    runs = [(len(list(same)), size) for size, same in groupby(sizes)]
    if len(runs) == 1:
        yield tuple(t.view(runs[0]) for t in flat)
        return
    parts = (t.split([number * size for number, size in runs]) for t in flat)
    for shape, *mine in zip(runs, *parts, strict=True):
        yield tuple(part.view(shape) for part in mine)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The memory order: strides without those of dimensions of size 1, which do not matter."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


class Slot:
    """Numbers on a device. ``values`` holds them, in float64 on the host, after :meth:`HostCopy.fetch`."""

    __slots__ = ("values",)

    values: Tensor


class HostCopy:
    """Collects numbers on devices and copies them to the host together, with one synchronization per device."""

    def __init__(self) -> None:
        self._numbers: dict[torch.device, dict[torch.dtype, list[tuple[tuple[Tensor, ...], Slot]]]] = {}

    def add(self, *numbers: Tensor) -> Slot:
        """Add 1-dim tensors of one device and dtype, to be read later as one."""
        slot = Slot()
        of_device = self._numbers.setdefault(numbers[0].device, {})
        of_device.setdefault(numbers[0].dtype, []).append((numbers, slot))
        return slot

    def fetch(self) -> None:
        """Copy everything to the host and fill all slots."""
        for device, numbers in self._numbers.items():
            wide = scalar_dtype(device)
            parts = [torch.cat([t for found, _ in alike for t in found]).to(wide) for alike in numbers.values()]
            values = torch.cat(parts).cpu().double()
            added = [one for alike in numbers.values() for one in alike]
            sizes = [sum(map(Tensor.numel, found)) for found, _ in added]
            for (_, slot), mine in zip(added, values.split(sizes), strict=True):
                slot.values = mine


class StepCounters:
    """The step counters of layers, predicted on the host without synchronizing.

    Aida counts steps on the device, where a step may be skipped. Computing with a counter there takes several
    kernel launches for a single number, and reading it synchronizes. So the host predicts that a layer has
    missed as many of the probe's steps as at the last measurement, and none before the first. The true counters
    are copied with the measurement and confirm it.
    """

    def __init__(self) -> None:
        self._missed: dict[str, float] = {}  #: by name; only of layers whose counter is on a device
        self._now = 0
        self._copied: list[tuple[list[str], Slot]] = []

    def predict(self, names: Sequence[str], counters: Sequence[Any], now: int, copy: HostCopy) -> list[float]:
        """Predict the layers' counters after step ``now``; the true ones come with the copy."""
        steps: list[float] = []
        there: dict[Any, tuple[list[str], list[Tensor]]] = {}
        for name, counter in zip(names, counters, strict=True):
            if not isinstance(counter, Tensor) or counter.device.type in HOSTS:
                steps.append(float(counter))
                continue
            steps.append(float(now - self._missed.get(name, 0)))
            owners, numbers = there.setdefault((counter.device, counter.dtype), ([], []))
            owners.append(name)
            numbers.append(counter)
        self._now = now
        self._copied = [(owners, copy.add(torch.stack(numbers).flatten())) for owners, numbers in there.values()]
        return steps

    def confirm(self) -> bool:
        """Whether the last prediction was right; call it after the copy is fetched."""
        predicted = self._missed
        true = ((owners, slot.values.tolist()) for owners, slot in self._copied)
        self._missed = {
            name: self._now - n for owners, numbers in true for name, n in zip(owners, numbers, strict=True)
        }
        return all(predicted.get(name, 0) == missed for name, missed in self._missed.items())
