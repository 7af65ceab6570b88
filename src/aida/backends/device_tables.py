"""What the Triton kernels read besides the tensors themselves: chunk maps, scratch room, tables.

Two kinds of things, kept apart because they age differently: a :class:`Layout` depends on the
tensors' sizes alone and lives as long as the model; a :class:`Tables` says where tensors lie and
which values apply, and is sent anew when one of these changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida.backends import Batch
from aida.backends.launch import Launch
from aida.backends.library import VALUE_COLUMNS
from aida.backends.tables import ADDRESS_ROWS


@dataclass(slots=True, eq=False)
class Layout:
    """What depends on the tensors' sizes alone: chunk maps, and scratch room for the kernels."""

    sizes: list[int]
    device_sizes: Tensor
    reduce_map: tuple[Tensor, Tensor, int]  #: tensor of each chunk, first chunk of each tensor, chunks
    apply_map: tuple[Tensor, Tensor, int]
    coefficients: Tensor
    arrivals: Tensor  #: chunks of a tensor that were reduced; back at 0 after every step
    finite: Tensor
    sums: Tensor
    squared: Tensor
    norm: Tensor  #: squared, over all tensors that are clipped
    pdl: bool  #: programmatic dependent launch: apply starts loading before the reduction ended
    _partial: dict[bool, Tensor] = field(default_factory=dict)

    def partial(self, batch: Batch, gram: bool) -> Tensor:
        """Room for the partial sums of plain or of Gram products."""
        partial = self._partial.get(gram)
        if partial is None:
            shape = (6 if gram else 3, self.reduce_map[2])
            partial = self._partial[gram] = torch.zeros(shape, dtype=torch.float64, device=batch.device)
        return partial


@dataclass(slots=True, eq=False)
class Tables:
    """What depends on where tensors lie and which values apply: one buffer, one copy."""

    buffer: Tensor  #: addresses, values (as float64), then address and kind of each run's lr
    run_of: Tensor
    counts: list[int]  #: tensors in each run
    generation: int  #: of the batch whose tables these are
    addresses: array[int] = field(default_factory=lambda: array("Q"))  #: as last sent
    lrs: list[tuple[int, int]] = field(default_factory=list)  #: address and kind of each lr on the device, as last sent
    aligned: bool = False
    behind_addresses: Tensor = field(init=False)
    values: Tensor = field(init=False)
    lr_addresses: Tensor = field(init=False)
    lr_kinds: Tensor = field(init=False)
    value_words: array[int] = field(default_factory=lambda: array("q"))  #: as last sent
    runs: list[tuple[Hyper, int]] | None = None  #: whose values these are
    launches: dict[Hashable, Launch] = field(default_factory=dict)  #: of kernels that read this table

    def __post_init__(self) -> None:
        start = len(ADDRESS_ROWS) * len(self.run_of)
        stop = start + len(VALUE_COLUMNS) * len(self.counts)
        self.behind_addresses = self.buffer[start:]
        self.values = self.buffer[start:stop].view(torch.float64)
        self.lr_addresses = self.buffer[stop : stop + len(self.counts)]
        self.lr_kinds = self.buffer[stop + len(self.counts) :]


@dataclass(slots=True, eq=False)
class Spare:
    """What a capture needs and cannot allocate: a table, and a way to send it."""

    tables: Tables
    pinned: Tensor
    streams: list[torch.cuda.Stream]


def make_tables(batch: Batch, like: Tables | None) -> Tables:
    counts = batch.counts()
    if like is not None and like.counts == counts:
        run_of = like.run_of  # never written again, so that it can be shared
    else:
        runs = [run for run, count in enumerate(counts) for _ in range(count)]
        run_of = torch.tensor(runs, dtype=torch.int32, device=batch.device)
    words = len(ADDRESS_ROWS) * len(batch) + (len(VALUE_COLUMNS) + 2) * len(counts)
    return Tables(torch.empty(words, dtype=torch.int64, device=batch.device), run_of, counts, batch.table.generation)


def make_spare(batch: Batch, like: Tables) -> Spare:
    tables = make_tables(batch, like)
    pinned = torch.empty_like(tables.buffer, device="cpu", pin_memory=True)
    return Spare(tables, pinned, [torch.cuda.Stream(batch.device) for _ in range(3)])


def make_layout(sizes: list[int], reduce_chunk: int, apply_chunk: int, device: torch.device) -> Layout:
    count = len(sizes)
    return Layout(
        sizes=sizes,
        device_sizes=torch.tensor(sizes, dtype=torch.int64, device=device),
        # a program for an empty tensor too: it counts its steps like any other
        reduce_map=_chunk_map([max(size, 1) for size in sizes], reduce_chunk, device),
        apply_map=_chunk_map(sizes, apply_chunk, device),
        coefficients=torch.empty(count, 6, dtype=torch.float64, device=device),
        arrivals=torch.zeros(count, dtype=torch.int32, device=device),
        finite=torch.ones(count, dtype=torch.int32, device=device),
        sums=torch.zeros(6, count, dtype=torch.float64, device=device),
        squared=torch.zeros(count, dtype=torch.float64, device=device),
        norm=torch.zeros((), dtype=torch.float64, device=device),
        pdl=_launches_dependently(device),
    )


def _launches_dependently(device: torch.device) -> bool:
    # ROCm devices are called cuda too, and number their generations otherwise
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _chunk_map(sizes: list[int], chunk: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    counts = [-(-size // chunk) for size in sizes]
    with torch.device("cpu"):  # whatever the default is
        first = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        tensor_of = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(counts))
    return tensor_of.to(device), first.to(device), sum(counts)
