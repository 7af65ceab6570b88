"""The fused path of a CPU: one call into ``_cpu.c`` a phase, over all tensors of the batch.

Where no run clips or raises, nobody needs to know anything between the phases; then both are one call,
which applies a tensor as soon as it is reduced, while its gradient and first moment are in cache.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from aida.backends import Batch
from aida.backends.tables import (
    VALUE_COLUMNS,
    AddressBook,
    is_dense,
    keep_state_layout,
    note_write,
    same_layout,
    value_rows,
)
from aida.hyper import Hyper

#: What parameters and gradients may be stored as, and the library's number for it.
STORAGE = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

#: Columns of the library's sums: rule.Products or rule.Gram. |g|^2 has one place in both.
SUMS = 6
GG = 2

_stride = torch.Tensor.stride
_size = torch.Tensor.numel


class Job(ctypes.Structure):
    """One batch as the library reads it: its ``struct job``, field by field."""

    _fields_ = [
        ("tensors", ctypes.c_int64),
        ("elements", ctypes.c_int64),
        ("runs", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("storage", ctypes.c_int64),
        ("level", ctypes.c_int64),
        ("addresses", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("first_chunk", ctypes.c_void_p),
        ("first_tensor", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("stage", ctypes.c_void_p),
        ("grad_scale", ctypes.c_double),
        ("squared_norm", ctypes.c_double),
    ]


Phase = Callable[[Job], None]


class Library(NamedTuple):
    reduce: Phase
    apply: Phase
    step: Phase  #: both, tensor by tensor
    chunk: int  #: elements that are summed up before they enter a float64 sum
    levels: int  #: how many instruction sets this processor can choose from; the last is the widest


def available() -> bool:
    """Whether the kernel was built and runs here."""
    return _library() is not None


def fits(param: Tensor, grad: Tensor) -> bool:
    """Whether the kernel can update this tensor."""
    return param.dtype in STORAGE and grad.dtype == param.dtype and param.device.type == "cpu" and is_dense(param)


class Cpu:
    def __init__(self, level: int | None = None) -> None:
        library = _library()
        if library is None:
            raise RuntimeError(
                "the C kernel of the fused CPU path was not built, or does not load here; "
                "ask aida.backends.cpu.available() first, and take the foreach path where it says False"
            )
        self._library = library
        self._job = Job(level=library.levels - 1 if level is None else level)
        self._sizes: list[int] = []
        self._runs: list[tuple[Hyper, int]] | None = None  # whose values the tables hold; None where they may change
        self._waits = False  # whether phase one was put off into phase two
        self._grads: list[Tensor] = []
        self._book = AddressBook()

    def reduce(self, batch: Batch) -> Tensor | None:
        self._read(batch)
        self._waits = not (batch.traits.clips or batch.traits.raises)
        if not self._waits:
            self._library.reduce(self._job)
        return torch.tensor(self._job.squared_norm, dtype=torch.float64) if batch.traits.clips else None

    def nonfinite(self) -> list[int]:
        if self._waits:
            self._library.reduce(self._job)
            self._waits = False
        return [i for i, gg in enumerate(self._sums[GG::SUMS].tolist()) if not math.isfinite(gg)]

    def apply(self, batch: Batch, squared_norm: Tensor | None) -> None:
        if batch.found_inf is None or float(batch.found_inf) == 0:
            if squared_norm is not None:
                self._job.squared_norm = float(squared_norm)
            if self._waits:
                self._library.step(self._job)
            else:
                self._library.apply(self._job)
            note_write(batch.params)
        self._grads = []  # a gradient must not outlive zero_grad() here

    def _read(self, batch: Batch) -> None:
        """Fill the job with where everything lies now, and with the values of this step."""
        layouts = list(map(_stride, batch.params))
        if any(list(map(_stride, moments)) != layouts for moments in (batch.exp_avgs, batch.exp_avg_vars)):
            keep_state_layout(batch)
        if not batch.grads_lie_alike:
            batch = replace(batch, grads=same_layout(batch.params, batch.grads))
        self._grads = batch.grads  # copies among them must outlive this call
        sizes = list(map(_size, batch.params))
        if sizes != self._sizes:
            self._read_sizes(sizes)
        if batch.runs is not self._runs:
            self._read_values(batch)
        self._addresses = array("Q", self._book.rows(self._book.look(batch)))

        job = self._job
        job.tensors = len(batch)
        job.threads = torch.get_num_threads()
        job.storage = STORAGE[batch.params[0].dtype]
        job.addresses = _address(self._addresses)
        job.grad_scale = 1.0 if batch.grad_scale is None else float(batch.grad_scale)

    def _read_values(self, batch: Batch) -> None:
        hypers = [hyper for hyper, _ in batch.runs]
        fixed = not any(isinstance(hyper.lr, Tensor) or hyper.has_tensor_betas for hyper in hypers)
        self._runs = batch.runs if fixed else None
        self._values = value_rows(map(_on_host, hypers))
        self._first_tensor = array("q", accumulate(batch.counts(), initial=0))

        job = self._job
        job.runs = len(hypers)
        job.values = _address(self._values)
        job.first_tensor = _address(self._first_tensor)

    def _read_sizes(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._size_table = array("q", sizes)
        chunk = self._library.chunk
        self._first_chunk = array("q", accumulate((-(-size // chunk) for size in sizes), initial=0))
        chunks = self._first_chunk[-1]
        self._partial = torch.empty(chunks * SUMS, dtype=torch.float64)
        self._sums = torch.empty(len(sizes) * SUMS, dtype=torch.float64)
        self._owner = torch.empty(chunks, dtype=torch.int32)
        self._stage = torch.empty(chunks, dtype=torch.uint8)

        job = self._job
        job.elements = sum(sizes)
        job.sizes = _address(self._size_table)
        job.first_chunk = _address(self._first_chunk)
        job.partial = self._partial.data_ptr()
        job.sums = self._sums.data_ptr()
        job.owner = self._owner.data_ptr()
        job.stage = self._stage.data_ptr()


def _on_host(hyper: Hyper) -> Hyper:
    """The values with a learning rate that lies on another device read from there."""
    return replace(hyper, lr=float(hyper.lr)) if isinstance(hyper.lr, Tensor) else hyper


def _address(table: array[int] | array[float]) -> int:
    return table.buffer_info()[0]


@cache
def _library() -> Library | None:
    """The shared object beside this file; None where it was not built or does not load.

    It carries no OpenMP runtime and finds that of torch among the symbols loaded already: two runtimes
    would each start a thread for every core. Where torch brings none, loading fails here and now.
    """
    spec = find_spec("aida.backends._cpu")
    if spec is None or spec.origin is None:
        return None
    try:
        loaded = ctypes.CDLL(spec.origin)
        for number in (loaded.aida_chunk, loaded.aida_levels, loaded.aida_job_bytes, loaded.aida_value_columns):
            number.argtypes, number.restype = (), ctypes.c_int64
        for phase in (loaded.aida_reduce, loaded.aida_apply, loaded.aida_step):
            phase.argtypes, phase.restype = (ctypes.POINTER(Job),), None
    except (OSError, AttributeError):
        return None
    if loaded.aida_job_bytes() != ctypes.sizeof(Job) or loaded.aida_value_columns() != len(VALUE_COLUMNS):
        return None  # built from other sources than these
    return Library(loaded.aida_reduce, loaded.aida_apply, loaded.aida_step, loaded.aida_chunk(), loaded.aida_levels())
