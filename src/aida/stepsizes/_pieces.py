"""Large tensors in pieces, and many small results in one copy to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from aida.backends import scalar_dtype
from aida.backends.tables import is_dense

#: Devices on which an operation costs no launch, and reading a number no wait.
HOSTS = ("cpu",)

#: Elements a piece holds at most, 16 MiB of float32: the size of every temporary, however large a model.
PIECE = 1 << 22


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same stretch of every tensor (all of one shape) at a time, real and 1-dim.

    Complex tensors come as pairs of reals. Views where all tensors lie alike in memory, whatever the
    order of their dimensions; else copies of a few rows.
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
    """Each column flat: of one layer piece by piece, of several layers at once, one after another.

    A column holds a tensor of each layer; those of one layer are all of one shape.
    """
    if len(columns[0]) == 1:
        yield from pieces(*(column[0] for column in columns))
        return
    yield [_laid_out(list(map(own_shard, column))) for column in columns]


def _laid_out(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of several tensors, one after another."""
    parts = []
    # stacking those of one shape is one operation, flattening each of them one a tensor
    for _, alike in groupby(tensors, attrgetter("shape")):
        one, *more = alike
        together = torch.stack([one, *more]) if more else one
        parts.append((torch.view_as_real(together) if together.is_complex() else together).reshape(-1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def by_size(sizes: Sequence[int], *flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Stretches that hold layers of these sizes in turn: for each run of one size a matrix of each, a row a layer."""
    runs = [(len(list(same)), size) for size, same in groupby(sizes)]
    if len(runs) == 1:
        yield tuple(t.view(runs[0]) for t in flat)
        return
    parts = (t.split([number * size for number, size in runs]) for t in flat)
    for shape, *mine in zip(runs, *parts, strict=True):
        yield tuple(part.view(shape) for part in mine)


def own_shard(tensor: Tensor) -> Tensor:
    """Of a DTensor what lies on this rank; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def own_size(tensor: Tensor) -> int:
    """How many real numbers of a tensor lie on this rank."""
    own = own_shard(tensor)
    return 2 * own.numel() if own.is_complex() else own.numel()


def _order(tensor: Tensor) -> tuple[int, ...]:
    """How the elements lie in memory; the stride of a dimension of size 1 means nothing."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


class Slot:
    """Numbers on some device; ``values``, in float64 on the host, once their :class:`HostCopy` was fetched."""

    __slots__ = ("values",)

    values: Tensor

    @property
    def value(self) -> float:
        """The number, where there is only one."""
        return self.values.item()


class HostCopy:
    """Numbers that are computed on a device here and there and read on the host together: one wait a device."""

    def __init__(self) -> None:
        self._numbers: dict[torch.device, dict[torch.dtype, list[tuple[tuple[Tensor, ...], Slot]]]] = {}

    def add(self, *numbers: Tensor) -> Slot:
        """Tensors of one dimension, all of one device and dtype, to be read later as one."""
        slot = Slot()
        of_device = self._numbers.setdefault(numbers[0].device, {})
        of_device.setdefault(numbers[0].dtype, []).append((numbers, slot))
        return slot

    def fetch(self) -> None:
        """Bring everything to the host; every slot then has its values."""
        for device, numbers in self._numbers.items():
            wide = scalar_dtype(device)
            parts = [torch.cat([t for found, _ in alike for t in found]).to(wide) for alike in numbers.values()]
            values = torch.cat(parts).cpu().double()
            added = [one for alike in numbers.values() for one in alike]
            sizes = [sum(map(Tensor.numel, found)) for found, _ in added]
            for (_, slot), mine in zip(added, values.split(sizes), strict=True):
                slot.values = mine
