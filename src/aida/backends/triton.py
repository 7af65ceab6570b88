"""The fused CUDA path: a handful of launches for all tensors and groups of a device and dtype.

The kernels find everything through tables on the device. The host sees at every step whether
something moved (gradients set to None come back elsewhere) or a value changed (a scheduler set lr),
and only then sends a new table: one small copy.
"""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida.backends import Batch
from aida.backends.capture import beside_capture, send_during_capture
from aida.backends.device_tables import Layout, Spare, Tables, make_layout, make_spare, make_tables
from aida.backends.launch import Launch
from aida.backends.staging import StagingBuffers
from aida.backends.tables import is_dense, note_write, value_rows

#: Elements and warps of a program, found by measurement: docs/performance.md.
REDUCE_CHUNK, REDUCE_WARPS = 8192, 4
APPLY_CHUNK, APPLY_WARPS = 512, 1
#: Partial sums a program adds up at a time.
COLLECT_BLOCK = 256

#: Address rows that kernels read 16 bytes at a time.
WIDE_ROWS = 4

#: Tables kept for sets of addresses that come back.
POOL_SIZE = 4

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Whether Triton is installed; its kernels then compile for any CUDA or ROCm device."""
    return importlib.util.find_spec("triton") is not None


def fits(param: Tensor, grad: Tensor) -> bool:
    return param.dtype in DTYPES and grad.dtype in DTYPES and is_dense(param)


class Triton:
    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._generation = -1  # of the batch of the last step
        self._pool: list[Tables] = []  # of eager steps, the last used first
        self._active: Tables | None = None  # of this step
        self._captured: list[Any] = []  # of ours, what a CUDA graph reads: it must outlive the capture
        self._spare: Spare | None = None  # for the next capture
        self._staging = StagingBuffers()
        self._merged = False

    # -- phases ----------------------------------------------------------------------------------

    def reduce(self, batch: Batch) -> Tensor | None:
        traits = batch.traits
        # nothing looks at the sums before they are used: the reduction can make the coefficients itself, and count
        self._merged = not traits.clips and not batch.may_be_called_off
        with _on(batch.device):  # the tables too: what is sent is waited for on the current device's stream
            layout = self._prepare(batch)
            self._launch("reduce", batch, self._reduce)
            if self._merged:
                return None
            self._launch("collect", batch, self._collect)
        return torch.sum(layout.squared, 0, out=layout.norm) if traits.clips else None

    def nonfinite(self) -> list[int]:
        assert self._layout is not None
        return [i for i, ok in enumerate(self._layout.finite.tolist()) if not ok]

    def apply(self, batch: Batch, squared_norm: Tensor | None) -> None:
        assert self._layout is not None
        with _on(batch.device):
            if squared_norm is not None and squared_norm is not self._layout.norm:
                self._layout.norm.copy_(squared_norm)  # over several batches; the kernel reads it in one place
            if not self._merged:
                self._launch("coefficients", batch, self._coefficients)
            if self._layout.apply_map[2]:
                self._launch("apply", batch, self._apply)
        note_write(batch.params)

    def _launch(self, name: str, batch: Batch, make: Callable[[Batch], Launch]) -> None:
        """Launch a kernel, directly where its arguments are those of the last step."""
        tables = self._active
        assert tables is not None
        if batch.grad_scale is not None or batch.found_inf is not None:
            make(batch)()  # tensors that are not ours, and others at every step
            return
        key = (name, self._merged, batch.traits, tables.aligned)
        launch = tables.launches.get(key)
        if launch is None:
            launch = tables.launches[key] = make(batch)
        launch()

    def _reduce(self, batch: Batch) -> Launch:
        from aida.backends.kernels import reduce_kernel

        layout, tables, traits = self._layout, self._active, batch.traits
        assert layout is not None
        assert tables is not None
        tensor_of, first_chunk, chunks = layout.reduce_map
        args = (
            tables.buffer, len(batch), layout.device_sizes, tables.run_of, tensor_of, first_chunk, tables.values,
            tables.lr_addresses, tables.lr_kinds, batch.grad_scale, batch.found_inf,
            layout.partial(batch, traits.clips), chunks, layout.arrivals, layout.coefficients,
            *_types(batch), tables.aligned, batch.grad_scale is not None, batch.found_inf is not None,
            traits.has_l2, traits.clips, self._merged, self._merged and layout.pdl, REDUCE_CHUNK, COLLECT_BLOCK,
        )  # fmt: skip
        return Launch(reduce_kernel, chunks, args, num_warps=REDUCE_WARPS)

    def _collect(self, batch: Batch) -> Launch:
        from aida.backends.kernels import collect_kernel

        layout, tables, traits = self._layout, self._active, batch.traits
        assert layout is not None
        assert tables is not None
        args = (
            tables.run_of, layout.reduce_map[1], tables.values, batch.grad_scale,
            layout.partial(batch, traits.clips), layout.reduce_map[2],
            layout.sums, layout.squared, layout.finite, len(batch), batch.exp_avgs[0].dtype == torch.float32,
            batch.grad_scale is not None, traits.has_l2, traits.clips, COLLECT_BLOCK,
        )  # fmt: skip
        return Launch(collect_kernel, len(batch), args)

    def _coefficients(self, batch: Batch) -> Launch:
        from aida.backends.kernels import coefficients_kernel

        layout, tables, traits = self._layout, self._active, batch.traits
        assert layout is not None
        assert tables is not None
        args = (
            tables.buffer, len(batch), tables.run_of, tables.values,
            tables.lr_addresses, tables.lr_kinds, batch.grad_scale, batch.found_inf,
            layout.sums, layout.norm, layout.finite, layout.coefficients,
            batch.grad_scale is not None, batch.found_inf is not None, traits.has_l2, traits.clips,
            not traits.clips and batch.exp_avgs[0].dtype == torch.float64,
        )  # fmt: skip
        return Launch(coefficients_kernel, len(batch), args)

    def _apply(self, batch: Batch) -> Launch:
        from aida.backends.kernels import apply_kernel

        layout, tables = self._layout, self._active
        assert layout is not None
        assert tables is not None
        tensor_of, first_chunk, chunks = layout.apply_map
        pdl = self._merged and layout.pdl
        args = (
            tables.buffer, len(batch), layout.device_sizes, tables.run_of, tensor_of, first_chunk,
            tables.values, layout.coefficients, chunks,
            *_types(batch), tables.aligned, batch.traits.has_l2, pdl, APPLY_CHUNK,
        )  # fmt: skip
        return Launch(apply_kernel, chunks, args, num_warps=APPLY_WARPS, **({"launch_pdl": True} if pdl else {}))

    # -- tables ----------------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> Layout:
        """Bring layout and tables up to date with the batch."""
        known = batch.table.generation == self._generation
        if not known:
            self._generation = batch.table.generation
            known = self._layout is not None and self._layout.sizes == list(map(torch.Tensor.numel, batch.params))
        capturing = batch.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and not known:
            self._spare = None
        spare = self._take_spare(batch) if capturing else None
        if self._layout is None or not known:
            sizes = list(map(torch.Tensor.numel, batch.params))
            self._layout = make_layout(sizes, REDUCE_CHUNK, APPLY_CHUNK, batch.device)
            self._pool, self._spare, self._staging = [], None, StagingBuffers()
        if spare is not None:
            self._active = self._fill(spare.tables, batch, spare)
            self._captured.append((self._layout, spare))
        else:
            self._active = self._fill(self._pooled(batch), batch, None)
            if self._spare is None and batch.device.type == "cuda":
                self._spare = make_spare(batch, self._active)
        return self._layout

    def _pooled(self, batch: Batch) -> Tables:
        """The table last used with these addresses: a training loop gets the same memory every few steps."""
        pool = self._pool
        if pool and pool[0].generation != batch.table.generation:
            pool.clear()
            self._spare = None
        for tables in pool:
            if tables.addresses == batch.table.addresses:
                if tables is not pool[0]:
                    pool.remove(tables)
                    pool.insert(0, tables)
                return tables
        if len(pool) < POOL_SIZE:
            pool.insert(0, make_tables(batch, pool[0] if pool else None))
        else:
            pool.insert(0, pool.pop())  # the one not used for longest
        return pool[0]

    def _fill(self, tables: Tables, batch: Batch, spare: Spare | None) -> Tables:
        """Send the table if it differs from what the device has."""
        addresses = batch.table.addresses
        settled = tables.runs is batch.runs and not batch.traits.has_host_tensors
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
        if same_place:  # a schedule set lr, and nothing moved
            self._send(tables.value_words, tables.behind_addresses, spare)
        else:
            tables.aligned = reduce(or_, addresses[: WIDE_ROWS * len(batch)], 0) % 16 == 0
            self._send(array("q", addresses.tobytes()) + tables.value_words, tables.buffer, spare)
        tables.addresses, tables.runs, tables.lrs = addresses[:], batch.runs, lrs
        return tables

    def _take_spare(self, batch: Batch) -> Spare:
        """A table for a CUDA graph: no eager step may share it, and it must lie outside the graph's own memory.

        Memory taken on the captured stream belongs to the graph, whose earlier kernels may use the same place.
        One table lies ready after an eager step; further graphs in a row get theirs beside the capture.
        """
        spare, self._spare = self._spare, None
        if spare is None and self._captured and self._pool and self._pool[0].generation == batch.table.generation:
            with beside_capture(self._captured[-1][1].streams) as stream:
                spare = make_spare(batch, self._pool[0]) if stream is not None else None
        if spare is None or spare.tables.counts != batch.counts():
            raise RuntimeError(
                "a CUDA graph of Aida's step can be captured only after an eager step with the same parameters and "
                "groups, which makes state and tables: take a step or two before capturing, on a side stream as "
                "torch's notes on CUDA graphs do"
            )
        return spare

    def _send(self, words: array[int], buffer: Tensor, spare: Spare | None) -> None:
        if buffer.device.type == "cpu":
            buffer.copy_(torch.frombuffer(words, dtype=torch.int64))
        elif spare is not None:
            spare.pinned.copy_(torch.frombuffer(words, dtype=torch.int64))
            send_during_capture(spare.pinned, buffer, spare.streams)
        else:
            self._staging.send(words, buffer)


def _device_lr(hyper: Hyper, device: torch.device) -> tuple[int, int]:
    """Address and kind of a learning rate that lives on the device: 0 none, 1 float32, 2 float64."""
    lr = hyper.lr
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        return 0, 0
    if lr.device != device:
        raise ValueError(f"the tensor lr is on {lr.device} but parameters are on {device}; put it on the CPU or there")
    kinds = {torch.float32: 1, torch.float64: 2}
    if lr.dtype not in kinds:
        raise TypeError(f"a tensor lr must be float32 or float64, not {lr.dtype}")
    return lr.data_ptr(), kinds[lr.dtype]


def _types(batch: Batch) -> tuple[Any, Any, Any]:
    return (
        _triton_type(batch.params[0].dtype),
        _triton_type(batch.grads[0].dtype),
        _triton_type(batch.exp_avgs[0].dtype),
    )


@cache
def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {
        torch.float32: tl.float32,
        torch.float64: tl.float64,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }[dtype]


class _on:  # noqa: N801 - reads as a statement
    """Launch on the tensors' device; entering torch.cuda.device costs more than asking first."""

    def __init__(self, device: torch.device) -> None:
        other = device.type == "cuda" and device.index != torch.cuda.current_device()
        self._guard = torch.cuda.device(device) if other else None

    def __enter__(self) -> None:
        if self._guard is not None:
            self._guard.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*exc)
