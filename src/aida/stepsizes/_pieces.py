"""Large tensors in pieces, and many small results in one copy to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from aida.backends import scalar_dtype
from aida.backends.tables import is_dense

#: Devices without kernel launches, on which reading a number does not synchronize.
HOSTS = ("cpu",)

#: Maximum number of elements in a piece, and so in every temporary: 16 MiB of float32.
PIECE = 1 << 22


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same part of every tensor (all of one shape), real and 1-dim.

    Complex tensors are viewed as pairs of reals. Parts are views if all tensors have the same memory order, and
    copies of a few rows otherwise.
    """
    real = [torch.view_as_real(t) if t.is_complex() else t for t in map(own_shard, tensors)]
    first = real[0]
    if all(t.is_contiguous() for t in real):
        flat = [t.view(-1) for t in real]
    elif all(_order(t) == _order(first) and is_dense(t) for t in real):
        flat = [t.as_strided((t.numel(),), (1,)) for t in real]
    else:
        rows = max(1, PIECE * first.shape[0] // max(1, first.numel()))
        for start in range(0, first.shape[0], rows):
            yield tuple(t[start : start + rows].reshape(-1) for t in real)
        return
    if first.numel() <= PIECE:
        yield tuple(flat)
        return
    for start in range(0, first.numel(), PIECE):
        yield tuple(t[start : start + PIECE] for t in flat)


def stretches(columns: Sequence[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
    """Yield each column flat: a single layer piece by piece, several layers concatenated.

    A column holds one tensor per layer. All tensors of a layer have the same shape.
    """
    if len(columns[0]) == 1:
        yield from pieces(*(column[0] for column in columns))
        return
    yield [_laid_out(list(map(own_shard, column))) for column in columns]


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


def own_shard(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def own_size(tensor: Tensor) -> int:
    """The number of real numbers of a tensor on this rank."""
    own = own_shard(tensor)
    return 2 * own.numel() if own.is_complex() else own.numel()


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The memory order: strides without those of dimensions of size 1, which do not matter."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


class Slot:
    """Numbers on a device. ``values`` holds them, in float64 on the host, after :meth:`HostCopy.fetch`."""

    __slots__ = ("values",)

    values: Tensor

    @property
    def value(self) -> float:
        """The number, if there is only one."""
        return self.values.item()


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
