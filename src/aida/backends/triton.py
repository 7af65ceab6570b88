"""The fused CUDA path: a few kernel launches for all tensors and groups of a device and dtype.

The kernels read pointers and hyper-parameters from tables on the device. At every step the host checks
whether a tensor moved (gradients that were set to None come back elsewhere) or a value changed (a scheduler
set lr). Only then it sends a new table, in one small copy.
"""

from __future__ import annotations

import importlib.util
from array import array
from functools import cache, reduce
from operator import or_

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida.backends import Batch
from aida.backends.capture import NO_EAGER_STEP, beside_capture, send_during_capture
from aida.backends.device_tables import (
    CaptureTables,
    Tables,
    Workspace,
    make_capture_tables,
    make_tables,
    make_workspace,
)
from aida.backends.launch import Plan
from aida.backends.plans import chunks_of, make_plan
from aida.backends.staging import StagingBuffers
from aida.backends.tables import SHAPED_ROWS, is_dense, note_write, value_rows

#: Tables kept for sets of addresses that recur.
POOL_SIZE = 4

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Whether Triton is installed; its kernels then compile for any CUDA or ROCm device."""
    return importlib.util.find_spec("triton") is not None


def fits(param: Tensor, grad: Tensor) -> bool:
    """For any storage."""
    return param.dtype in DTYPES and grad.dtype in DTYPES and is_dense(param)


class Triton:
    def __init__(self) -> None:
        self._workspace: Workspace | None = None
        self._generation: int | None = None  # of the tensors of the last step
        self._pool: list[Tables] = []  # of eager steps, most recently used first
        self._for_capture: CaptureTables | None = None  # reserved for the next capture
        self._captured: list[tuple[Workspace, CaptureTables]] = []  # in use by CUDA graphs, so they must stay alive
        self._staging = StagingBuffers()

    # -- phases ----------------------------------------------------------------------------------

    def reduce(self, batch: Batch) -> Plan:
        with _on(batch.device):  # sending the tables too: events are recorded on the current device
            plan = self._prepare(batch)
            plan.reduce()
            if plan.collect is not None:
                plan.collect()
                if plan.squared_norm is not None:
                    torch.sum(plan.squared, 0, out=plan.squared_norm)
        return plan

    def apply(self, batch: Batch, reduced: Plan, squared_norm: Tensor | None) -> None:
        with _on(batch.device):
            if squared_norm is not None and squared_norm is not reduced.norm:
                reduced.norm.copy_(squared_norm)  # the sum over several batches; the kernel reads it from here
            if reduced.coefficients is not None:
                reduced.coefficients()
            if reduced.apply is not None:
                reduced.apply()
        note_write((batch.wholes or batch).params)

    # -- tables ----------------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> Plan:
        """Update the tables for this batch; returns the launches of its step, cached if their arguments are."""
        known = batch.generation == self._generation
        if not known:
            self._generation = batch.generation
            known = self._workspace is not None and self._workspace.sizes == list(map(torch.Tensor.numel, batch.params))
        capturing = batch.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and not known:
            self._for_capture = None
        reserved = self._take_reserved(batch) if capturing else None
        if self._workspace is None or not known:
            sizes = list(map(torch.Tensor.numel, batch.params))
            self._workspace = make_workspace(sizes, *chunks_of(batch.storage), batch.device)
            self._pool, self._for_capture, self._staging = [], None, StagingBuffers()
        if reserved is not None:
            tables = self._fill(reserved.tables, batch, reserved)
            self._captured.append((self._workspace, reserved))
        else:
            tables = self._fill(self._pooled(batch), batch, None)
            if self._for_capture is None and batch.device.type == "cuda":
                self._for_capture = make_capture_tables(batch, tables)
        # if nothing happens between the phases, the reduction can compute the coefficients, which saves a launch
        traits = batch.traits
        merged = not traits.clips and not batch.may_abort and batch.exchange is None
        if batch.grad_scale is not None or batch.found_inf is not None:
            return make_plan(batch, self._workspace, tables, merged)  # GradScaler passes other tensors at every step
        key = (merged, traits, tables.aligned)
        plan = tables.plans.get(key)
        if plan is None:
            plan = tables.plans[key] = make_plan(batch, self._workspace, tables, merged)
        return plan

    def _pooled(self, batch: Batch) -> Tables:
        """The table last used with these addresses: a training loop gets the same memory every few steps."""
        pool = self._pool
        if pool and pool[0].generation != batch.generation:
            pool.clear()
            self._for_capture = None
        for tables in pool:
            if tables.addresses == batch.table.addresses:
                if tables is not pool[0]:
                    pool.remove(tables)
                    pool.insert(0, tables)
                return tables
        if len(pool) < POOL_SIZE:
            pool.insert(0, make_tables(batch, pool[0] if pool else None))
        else:
            pool.insert(0, pool.pop())  # the least recently used one
        return pool[0]

    def _fill(self, tables: Tables, batch: Batch, reserved: CaptureTables | None) -> Tables:
        """Send the table if it differs from what the device has."""
        addresses = batch.table.addresses
        settled = tables.values_generation == batch.values_generation and not batch.traits.has_host_tensors
        lrs = tables.lrs
        if not settled or batch.traits.has_device_lr:
            lrs = [_device_lr(hyper, batch.device) for hyper, _ in batch.runs]
            settled = settled and lrs == tables.lrs
        same_place = addresses == tables.addresses
        if settled and same_place:
            return tables
        if not settled:
            tables.value_words = array("q", value_rows(hyper for hyper, _ in batch.runs).tobytes())
            tables.value_words.extend([address for address, _ in lrs])
            tables.value_words.extend([kind for _, kind in lrs])
        if same_place:  # a scheduler set lr, and no tensor moved
            self._send(tables.value_words, tables.after_addresses, reserved)
        else:
            shaped = addresses[: SHAPED_ROWS * len(batch)]
            if batch.storage.rounding == "kahan":
                shaped += addresses[-len(batch) :]  # the compensations
            tables.aligned = reduce(or_, shaped, 0) % 16 == 0
            self._send(array("q", addresses.tobytes()) + tables.value_words, tables.buffer, reserved)
        tables.addresses, tables.values_generation, tables.lrs = addresses[:], batch.values_generation, lrs
        return tables

    def _take_reserved(self, batch: Batch) -> CaptureTables:
        """Tables for a CUDA graph, which share no memory with eager steps or with the graph's memory pool.

        Memory that is allocated on the captured stream belongs to the graph, and its earlier kernels may use it.
        Every eager step leaves one reserved set; a second capture in a row allocates its own beside the capture.
        """
        reserved, self._for_capture = self._for_capture, None
        if reserved is None and self._captured and self._pool and self._pool[0].generation == batch.generation:
            with beside_capture(self._captured[-1][1].streams) as stream:
                reserved = make_capture_tables(batch, self._pool[0]) if stream is not None else None
        if reserved is None or reserved.tables.counts != batch.counts():
            raise RuntimeError(NO_EAGER_STEP)
        return reserved

    def _send(self, words: array[int], buffer: Tensor, reserved: CaptureTables | None) -> None:
        if buffer.device.type == "cpu":
            buffer.copy_(torch.frombuffer(words, dtype=torch.int64))
        elif reserved is not None:
            reserved.pinned.copy_(torch.frombuffer(words, dtype=torch.int64))
            send_during_capture(reserved.pinned, buffer, reserved.streams)
        else:
            self._staging.send(words, buffer)


def _device_lr(hyper: Hyper, device: torch.device) -> tuple[int, int]:
    """Address and kind of an lr tensor on the device. Kinds: 0 no tensor, 1 float32, 2 float64."""
    lr = hyper.lr
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        return 0, 0
    if lr.device != device:
        raise ValueError(
            f"the tensor lr is on {lr.device} but parameters are on {device}; move it to {device} or the CPU"
        )
    kinds = {torch.float32: 1, torch.float64: 2}
    if lr.dtype not in kinds:
        raise TypeError(f"a tensor lr must be float32 or float64, not {lr.dtype}; pass lr.float()")
    return lr.data_ptr(), kinds[lr.dtype]


class _on:  # noqa: N801 - reads as a statement
    """Make the tensors' device current, unless it is: entering torch.cuda.device costs more than the check."""

    def __init__(self, device: torch.device) -> None:
        other = device.type == "cuda" and device.index != torch.cuda.current_device()
        self._guard = torch.cuda.device(device) if other else None

    def __enter__(self) -> None:
        if self._guard is not None:
            self._guard.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*exc)
