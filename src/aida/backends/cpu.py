"""The fused CPU path: one call into ``_cpu.c`` per phase, over all tensors of the batch.

If no run clips or raises, and no other rank has a part of the tensors, nothing happens between the phases. Then one
call does both: it applies each tensor as soon as it is reduced, while its gradient and first moment are in cache.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida._step.storage import Precision, Rounding
from aida.backends import Batch
from aida.backends.columns import PRODUCT_COLUMNS
from aida.backends.library import Job, address_of, library
from aida.backends.tables import is_dense, note_write, value_rows

#: Dtypes of parameters and gradients, with the library's number of each.
STORAGE = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def available() -> bool:
    """Whether the kernel was built and runs here."""
    return library() is not None


def fits(param: Tensor, grad: Tensor) -> bool:
    """Whether the kernel can update this tensor, in whatever precision its state is stored."""
    return param.dtype in STORAGE and grad.dtype == param.dtype and param.device.type == "cpu" and is_dense(param)


class _Reduced(NamedTuple):
    squared_norm: Tensor | None
    sums: Tensor  #: shares the library's memory, as does ``finite``
    finite: Tensor
    deferred: bool  #: whether phase one is left to run together with phase two

    def nonfinite(self) -> list[int]:
        return [i for i, ok in enumerate(self.finite.tolist()) if not ok]


class Cpu:
    def __init__(self, level: int | None = None) -> None:
        found = library()
        if found is None:
            raise RuntimeError(
                "the C kernel of the fused CPU path was not built or does not load here; "
                "call aida.backends.cpu.available() first, and use the foreach path if it returns False"
            )
        self._library = found
        self._job = Job(level=found.levels - 1 if level is None else level)
        self._arrays: dict[str, array[Any]] = {}  # what the pointers of the job point to
        self._generation: int | None = None  # of the tensors whose sizes the job holds
        self._values_generation: int | None = None  # of the values in the job; None if they may change in place

    def reduce(self, batch: Batch) -> _Reduced:
        self._read(batch)
        clips = batch.traits.clips
        deferred = not (clips or batch.traits.raises or batch.exchange)
        if not deferred:
            self._library.reduce(self._job)
        norm = None
        if clips and not batch.exchange:
            norm = torch.tensor(self._job.squared_norm, dtype=torch.float64, device="cpu")
        return _Reduced(norm, self._sums, self._finite, deferred)

    def apply(self, batch: Batch, reduced: _Reduced, squared_norm: Tensor | None) -> None:
        if batch.found_inf is not None and float(batch.found_inf) != 0:
            return
        if squared_norm is not None:
            self._job.squared_norm = float(squared_norm)
        if reduced.deferred:
            self._library.step(self._job)
        else:
            self._library.apply(self._job)
        note_write((batch.wholes or batch).params)

    def _read(self, batch: Batch) -> None:
        """Fill the job with the addresses and values of this step."""
        if batch.generation != self._generation:
            self._read_sizes(batch)
        if batch.values_generation != self._values_generation:
            self._read_values(batch)
        job = self._job
        job.threads = torch.get_num_threads()
        job.addresses = address_of(batch.table.addresses)
        job.grad_scale = 1.0 if batch.grad_scale is None else float(batch.grad_scale)

    def _read_values(self, batch: Batch) -> None:
        hypers = [hyper for hyper, _ in batch.runs]
        fixed = not any(isinstance(hyper.lr, Tensor) or hyper.has_tensor_betas for hyper in hypers)
        self._values_generation = batch.values_generation if fixed else None
        self._job.runs = len(hypers)
        self._set("values", value_rows(map(_on_host, hypers)))
        self._set("first_tensor", array("q", accumulate(batch.counts(), initial=0)))

    def _read_sizes(self, batch: Batch) -> None:
        self._generation = batch.generation
        sizes = array("q", (p.numel() for p in batch.params))
        chunk = self._library.chunk
        first_chunk = array("q", accumulate((-(-size // chunk) for size in sizes), initial=0))
        chunks, tensors, products = first_chunk[-1], len(batch), len(PRODUCT_COLUMNS)

        job = self._job
        job.tensors = tensors
        job.storage = STORAGE[batch.params[0].dtype]
        job.state = get_args(Precision).index(batch.storage.state)
        job.rounding = get_args(Rounding).index(batch.storage.rounding)
        job.elements = sum(sizes)
        self._set("sizes", sizes)
        self._set("first_chunk", first_chunk)
        self._set("streams", array("q", chain.from_iterable(batch.streams())))
        self._set("partial", array("d", bytes(8 * products * chunks)))
        self._set("sums", array("d", bytes(8 * products * tensors)))
        self._set("finite", array("B", bytes(tensors)))
        self._sums = torch.frombuffer(self._arrays["sums"], dtype=torch.float64).view(tensors, products)
        self._finite = torch.frombuffer(self._arrays["finite"], dtype=torch.uint8)
        self._set("owner", array("i", bytes(4 * chunks)))
        self._set("stage", array("B", bytes(chunks)))

    def _set(self, name: str, table: array[Any]) -> None:
        """Point a field of the job to an array, and keep the array alive. A tensor would follow the default device."""
        self._arrays[name] = table
        setattr(self._job, name, address_of(table))


def _on_host(hyper: Hyper) -> Hyper:
    """The values with lr as a number, read from its device if it is a tensor."""
    return replace(hyper, lr=float(hyper.lr)) if isinstance(hyper.lr, Tensor) else hyper
