"""The fused path of a CPU: one call into ``_cpu.c`` a phase, over all tensors of the batch.

Where no run clips or raises, nobody needs to know anything between the phases; then both are one call,
which applies a tensor as soon as it is reduced, while its gradient and first moment are in cache.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida.backends import Batch
from aida.backends.library import Job, address_of, library
from aida.backends.tables import is_dense, note_write, value_rows
from aida.rule import Gram

#: What parameters and gradients may be stored as, and the library's number for it.
STORAGE = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

#: Columns of the library's sums.
SUMS = len(Gram._fields)


def available() -> bool:
    """Whether the kernel was built and runs here."""
    return library() is not None


def fits(param: Tensor, grad: Tensor) -> bool:
    """Whether the kernel can update this tensor."""
    return param.dtype in STORAGE and grad.dtype == param.dtype and param.device.type == "cpu" and is_dense(param)


class Cpu:
    def __init__(self, level: int | None = None) -> None:
        found = library()
        if found is None:
            raise RuntimeError(
                "the C kernel of the fused CPU path was not built, or does not load here; "
                "ask aida.backends.cpu.available() first, and take the foreach path where it says False"
            )
        self._library = found
        self._job = Job(level=found.levels - 1 if level is None else level)
        self._generation = -1  # of the batch whose sizes the tables hold
        self._runs: list[tuple[Hyper, int]] | None = None  # whose values the tables hold; None where they may change
        self._waits = False  # whether phase one was put off into phase two

    def reduce(self, batch: Batch) -> Tensor | None:
        self._read(batch)
        self._waits = not (batch.traits.clips or batch.traits.raises)
        if not self._waits:
            self._library.reduce(self._job)
        if not batch.traits.clips:
            return None
        return torch.tensor(self._job.squared_norm, dtype=torch.float64, device="cpu")

    def nonfinite(self) -> list[int]:
        if self._waits:
            self._library.reduce(self._job)
            self._waits = False
        return [i for i, ok in enumerate(self._finite) if not ok]

    def apply(self, batch: Batch, squared_norm: Tensor | None) -> None:
        if batch.found_inf is not None and float(batch.found_inf) != 0:
            return
        if squared_norm is not None:
            self._job.squared_norm = float(squared_norm)
        if self._waits:
            self._library.step(self._job)
        else:
            self._library.apply(self._job)
        note_write(batch.params)

    def _read(self, batch: Batch) -> None:
        """Fill the job with where everything lies now, and with the values of this step."""
        if batch.table.generation != self._generation:
            self._read_sizes(batch)
        if batch.runs is not self._runs:
            self._read_values(batch)
        job = self._job
        job.threads = torch.get_num_threads()
        job.addresses = address_of(batch.table.addresses)
        job.grad_scale = 1.0 if batch.grad_scale is None else float(batch.grad_scale)

    def _read_values(self, batch: Batch) -> None:
        hypers = [hyper for hyper, _ in batch.runs]
        fixed = not any(isinstance(hyper.lr, Tensor) or hyper.has_tensor_betas for hyper in hypers)
        self._runs = batch.runs if fixed else None
        self._values = value_rows(map(_on_host, hypers))
        self._first_tensor = array("q", accumulate(batch.counts(), initial=0))

        job = self._job
        job.runs = len(hypers)
        job.values = address_of(self._values)
        job.first_tensor = address_of(self._first_tensor)

    def _read_sizes(self, batch: Batch) -> None:
        self._generation = batch.table.generation
        self._sizes = array("q", (p.numel() for p in batch.params))
        chunk = self._library.chunk
        self._first_chunk = array("q", accumulate((-(-size // chunk) for size in self._sizes), initial=0))
        # plain memory, not tensors: those would follow torch.set_default_device
        chunks, tensors = self._first_chunk[-1], len(batch)
        self._partial = array("d", bytes(8 * SUMS * chunks))
        self._sums = array("d", bytes(8 * SUMS * tensors))
        self._finite = array("B", bytes(tensors))
        self._owner = array("i", bytes(4 * chunks))
        self._stage = array("B", bytes(chunks))

        job = self._job
        job.tensors = tensors
        job.storage = STORAGE[batch.params[0].dtype]
        job.elements = sum(self._sizes)
        job.sizes = address_of(self._sizes)
        job.first_chunk = address_of(self._first_chunk)
        job.partial = address_of(self._partial)
        job.sums = address_of(self._sums)
        job.finite = address_of(self._finite)
        job.owner = address_of(self._owner)
        job.stage = address_of(self._stage)


def _on_host(hyper: Hyper) -> Hyper:
    """The values with a learning rate that lies on another device read from there."""
    return replace(hyper, lr=float(hyper.lr)) if isinstance(hyper.lr, Tensor) else hyper
