"""Large tensors in pieces, and many small results in one copy to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from aida.backends import scalar_dtype
from aida.backends.tables import is_dense
from aida.stepsizes import histogram

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


def own_shard(tensor: Tensor) -> Tensor:
    """Of a DTensor what lies on this rank; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _order(tensor: Tensor) -> tuple[int, ...]:
    """How the elements lie in memory; the stride of a dimension of size 1 means nothing."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


class Slot:
    """Numbers on some device; ``values`` once their :class:`HostCopy` was fetched."""

    __slots__ = ("values",)

    values: list[float]

    @property
    def value(self) -> float:
        """The number, where there is only one."""
        (value,) = self.values
        return value


class HostCopy:
    """Numbers that are computed on a device here and there and read on the host together: one wait a device."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Slot]]] = {}
        self._counts: dict[tuple[torch.device, int], list[tuple[Tensor, Sequence[int], Slot]]] = {}

    def add(self, numbers: Tensor) -> Slot:
        """A tensor of at most one dimension, to be read later."""
        slot = Slot()
        flat = numbers if numbers.ndim else numbers.unsqueeze(0)
        self._numbers.setdefault((numbers.device, numbers.dtype), []).append((flat, slot))
        return slot

    def add_counts(self, counts: Tensor, ranks: Sequence[int]) -> Slot:
        """Histograms, one a row, and ranks: three numbers a row and rank, those of :func:`histogram.locate`."""
        slot = Slot()
        self._counts.setdefault((counts.device, len(ranks)), []).append((counts, ranks, slot))
        return slot

    def fetch(self) -> None:
        """Bring everything to the host; every slot then has its values."""
        for device in dict.fromkeys(device for device, _ in chain(self._numbers, self._counts)):
            self._fetch_from(device)

    def _fetch_from(self, device: torch.device) -> None:
        wide = scalar_dtype(device)
        parts: list[Tensor] = []
        slots: list[tuple[int, Slot]] = []
        for (where, _), numbers in self._numbers.items():
            if where == device:
                parts.append(torch.cat([found for found, _ in numbers]).to(wide))
                slots += [(len(found), slot) for found, slot in numbers]
        for (where, _), counts in self._counts.items():
            if where == device:
                places = histogram.locate([found for found, _, _ in counts], [ranks for _, ranks, _ in counts])
                parts.append(places.flatten().to(wide))
                slots += [(3 * len(found) * len(ranks), slot) for found, ranks, slot in counts]
        values = iter(torch.cat(parts).tolist())
        for size, slot in slots:
            slot.values = list(islice(values, size))
