"""What the Triton kernels use besides the tensors of a batch.

There are two kinds of it, with different lifetimes. A :class:`Workspace` depends only on the tensors' sizes
and lives as long as the model. A :class:`Tables` holds pointers and hyper-parameters, and is sent again when
one of them changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from aida.backends import Batch
from aida.backends.columns import COEFFICIENT_COLUMNS, PRODUCT_COLUMNS, VALUE_COLUMNS
from aida.backends.launch import Plan


@dataclass(slots=True, eq=False)
class Workspace:
    """Chunk maps and scratch memory of the kernels: everything that depends only on the tensors' sizes."""

    sizes: list[int]
    device_sizes: Tensor
    reduce_map: tuple[Tensor, Tensor, int]  #: tensor of each chunk, first chunk of each tensor, number of chunks
    apply_map: tuple[Tensor, Tensor, int]
    coefficients: Tensor  #: one row of columns per tensor, then the eps share of each tensor's 8-bit state
    arrivals: Tensor  #: chunks of a tensor that are reduced; reset to 0 by every step
    finite: Tensor
    sums: Tensor
    squared: Tensor
    norm: Tensor  #: squared norm over all clipped tensors
    pdl: bool  #: programmatic dependent launch: apply starts loading before the reduction has ended
    converts_e4m3: bool  #: whether the device has an instruction for that
    _partial: dict[bool, Tensor] = field(default_factory=dict)

    def partial(self, batch: Batch, gram: bool) -> Tensor:
        """Memory for the partial sums: of all inner products, or of the three that are needed without clipping."""
        partial = self._partial.get(gram)
        if partial is None:
            shape = (len(PRODUCT_COLUMNS) if gram else 3, self.reduce_map[2])
            partial = self._partial[gram] = torch.zeros(shape, dtype=torch.float64, device=batch.device)
        return partial


@dataclass(slots=True, eq=False)
class Tables:
    """The pointers and hyper-parameters of a batch in one device buffer, so that one copy sends them."""

    buffer: Tensor  #: addresses, values (as float64), then address and kind of each run's lr
    run_of: Tensor  #: the run of each tensor
    counts: list[int]  #: tensors per run
    generation: int  #: of the batch's tensors
    rows: int  #: of the pointer table
    streams: Tensor | None  #: where the random bits of each tensor are; None if nothing is rounded stochastically
    strided: bool  #: whether the positions of one of them have gaps
    wide: bool  #: whether one of them has a position of more than 32 bits
    addresses: array[int] = field(default_factory=lambda: array("Q"))  #: as last sent
    lrs: list[tuple[int, int]] = field(default_factory=list)  #: address and kind of each lr on the device, as last sent
    aligned: bool = False  #: whether kernels may access all tensors 16 bytes at a time
    after_addresses: Tensor = field(init=False)
    values: Tensor = field(init=False)
    lr_addresses: Tensor = field(init=False)
    lr_kinds: Tensor = field(init=False)
    value_words: array[int] = field(default_factory=lambda: array("q"))  #: as last sent
    values_generation: int | None = None  #: of the values as last sent
    plans: dict[Hashable, Plan] = field(default_factory=dict)  #: launches of kernels that read this buffer

    def __post_init__(self) -> None:
        start = self.rows * len(self.run_of)
        stop = start + len(VALUE_COLUMNS) * len(self.counts)
        self.after_addresses = self.buffer[start:]
        self.values = self.buffer[start:stop].view(torch.float64)
        self.lr_addresses = self.buffer[stop : stop + len(self.counts)]
        self.lr_kinds = self.buffer[stop + len(self.counts) :]


@dataclass(slots=True, eq=False)
class CaptureTables:
    """Tables reserved for a CUDA graph, with what a capture needs to send them and cannot allocate itself."""

    tables: Tables
    pinned: Tensor
    streams: list[torch.cuda.Stream]


def make_tables(batch: Batch, like: Tables | None) -> Tables:
    counts = batch.counts()
    if like is not None and like.counts == counts:
        run_of = like.run_of  # never written again, so it can be shared
    else:
        runs = [run for run, count in enumerate(counts) for _ in range(count)]
        run_of = torch.tensor(runs, dtype=torch.int32, device=batch.device)
    if like is not None and like.generation == batch.generation:
        streams, strided, wide = like.streams, like.strided, like.wide
    else:
        streams, strided, wide = _streams(batch)
    rows = len(batch.tensor_lists())
    words = rows * len(batch) + (len(VALUE_COLUMNS) + 2) * len(counts)
    buffer = torch.empty(words, dtype=torch.int64, device=batch.device)
    return Tables(buffer, run_of, counts, batch.generation, rows, streams, strided, wide)


def _streams(batch: Batch) -> tuple[Tensor | None, bool, bool]:
    state, rounding = batch.storage
    if state == "float32" and rounding != "stochastic":
        return None, False, False
    streams = batch.streams()
    sizes = list(map(torch.Tensor.numel, batch.params))
    strided = any(stream.run < size for stream, size in zip(streams, sizes, strict=True))
    wide = any(stream.position(max(size - 1, 0)) >> 32 for stream, size in zip(streams, sizes, strict=True))
    return torch.tensor(streams, dtype=torch.int64, device=batch.device), strided, wide


def make_capture_tables(batch: Batch, like: Tables) -> CaptureTables:
    tables = make_tables(batch, like)
    pinned = torch.empty_like(tables.buffer, device="cpu", pin_memory=True)
    return CaptureTables(tables, pinned, [torch.cuda.Stream(batch.device) for _ in range(3)])


def make_workspace(sizes: list[int], reduce_chunk: int, apply_chunk: int, device: torch.device) -> Workspace:
    count = len(sizes)
    return Workspace(
        sizes=sizes,
        device_sizes=torch.tensor(sizes, dtype=torch.int64, device=device),
        # empty tensors get a program too, which counts their steps
        reduce_map=_chunk_map([max(size, 1) for size in sizes], reduce_chunk, device),
        apply_map=_chunk_map(sizes, apply_chunk, device),
        coefficients=torch.empty(count * (len(COEFFICIENT_COLUMNS) + 1), dtype=torch.float64, device=device),
        arrivals=torch.zeros(count, dtype=torch.int32, device=device),
        finite=torch.ones(count, dtype=torch.int32, device=device),
        sums=torch.zeros(len(PRODUCT_COLUMNS), count, dtype=torch.float64, device=device),
        squared=torch.zeros(count, dtype=torch.float64, device=device),
        norm=torch.zeros((), dtype=torch.float64, device=device),
        pdl=_has_capability(device, (9, 0)),
        converts_e4m3=_has_capability(device, (8, 9)),
    )


def _has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    # ROCm devices are called cuda too, and number their architectures differently
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= least


def _chunk_map(sizes: list[int], chunk: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    counts = [-(-size // chunk) for size in sizes]
    with torch.device("cpu"):  # not the default device
        first = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        tensor_of = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(counts))
    return tensor_of.to(device), first.to(device), sum(counts)
