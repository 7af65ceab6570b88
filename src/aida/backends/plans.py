"""The kernels of the fused CUDA path, bound to the arguments of one step."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from aida._step.storage import FULL, Storage
from aida.backends import Batch
from aida.backends.device_tables import Tables, Workspace
from aida.backends.launch import Launch, Plan

#: Elements and warps per program, chosen by measurement: docs/performance.md.
REDUCE_CHUNK, REDUCE_WARPS = 8192, 4
APPLY_CHUNK, APPLY_WARPS = 512, 1
#: Of the low kernels, whose programs work through their chunk tile by tile.
LOW_REDUCE_CHUNK, LOW_REDUCE_TILE, LOW_REDUCE_WARPS = 8192, 1024, 4
LOW_APPLY_CHUNK, LOW_APPLY_TILE, LOW_APPLY_WARPS = 2048, 256, 1
#: Bytes that a thread moves at a time.
ACCESS = 16
#: Partial sums that a program adds at a time.
COLLECT_BLOCK = 256


def make_plan(batch: Batch, workspace: Workspace, tables: Tables, merged: bool) -> Plan:
    """The launches of a step. If ``merged``, the reduction also computes the coefficients and counts the step."""
    from aida.backends import kernels, low_kernels

    clips, has_l2 = batch.traits.clips, batch.traits.has_l2
    grad_scale, found_inf = batch.grad_scale, batch.found_inf
    dtypes = [tensors[0].dtype for tensors in (batch.params, batch.grads, batch.exp_avgs)]
    types = [_triton_type(dtype) for dtype in dtypes]
    storage = batch.storage
    full, kahan, native = storage == FULL, storage.rounding == "kahan", workspace.converts_e4m3
    # of the low kernels: the number of elements of the widest dtype
    access = tables.aligned if full else width(dtypes) if tables.aligned else 1
    pdl = merged and workspace.pdl
    reduce_chunk, apply_chunk = chunks_of(storage)
    if full:
        reduce_kernel, apply_kernel = kernels.reduce_kernel, kernels.apply_kernel
        reduce_warps, apply_warps = REDUCE_WARPS, APPLY_WARPS
    else:
        reduce_kernel, apply_kernel = low_kernels.low_reduce_kernel, low_kernels.low_apply_kernel
        reduce_warps, apply_warps = LOW_REDUCE_WARPS, LOW_APPLY_WARPS
    partial = workspace.partial(batch, clips)
    tensor_of, first_chunk, chunks = workspace.reduce_map
    args: tuple[Any, ...] = (
        tables.buffer, len(batch), workspace.device_sizes, tables.run_of, tensor_of, first_chunk, tables.values,
        tables.lr_addresses, tables.lr_kinds, grad_scale, found_inf,
        partial, chunks, workspace.arrivals, workspace.coefficients,
        *types, access, grad_scale is not None, found_inf is not None,
        has_l2, clips, merged, pdl, reduce_chunk, COLLECT_BLOCK, *(() if full else (kahan, native, LOW_REDUCE_TILE)),
    )  # fmt: skip
    reduce = Launch(reduce_kernel, chunks, args, num_warps=reduce_warps)

    collect = coefficients = apply = None
    if not merged:
        args = (
            tables.run_of, first_chunk, tables.values, grad_scale, partial, chunks,
            workspace.sums, workspace.squared, workspace.finite, len(batch), dtypes[2] != torch.float64,
            grad_scale is not None, has_l2, clips, COLLECT_BLOCK,
        )  # fmt: skip
        collect = Launch(kernels.collect_kernel, len(batch), args)
        args = (
            tables.buffer, len(batch), tables.run_of, tables.values,
            tables.lr_addresses, tables.lr_kinds, grad_scale, found_inf,
            workspace.sums, workspace.norm, workspace.finite, workspace.coefficients,
            grad_scale is not None, found_inf is not None, has_l2, clips,
            not clips and dtypes[2] == torch.float64, storage.state == "fp8",
        )  # fmt: skip
        coefficients = Launch(kernels.coefficients_kernel, len(batch), args)

    tensor_of, first_chunk, chunks = workspace.apply_map
    if chunks:
        args = (
            tables.buffer, len(batch), workspace.device_sizes, tables.run_of, tensor_of, first_chunk,
            tables.values, workspace.coefficients, chunks,
            *types, access, has_l2, pdl, apply_chunk,
            *(() if full else (tables.streams, storage.rounding, tables.strided, tables.wide, native, LOW_APPLY_TILE)),
        )  # fmt: skip
        options = {"launch_pdl": True} if pdl else {}
        apply = Launch(apply_kernel, chunks, args, num_warps=apply_warps, **options)
    norm = workspace.norm
    return Plan(
        reduce, collect, coefficients, apply, workspace.sums.T, workspace.finite, workspace.squared,
        norm, norm if clips and batch.exchange is None else None,
    )  # fmt: skip


def chunks_of(storage: Storage) -> tuple[int, int]:
    """Elements per program of the reduction and of apply."""
    return (REDUCE_CHUNK, APPLY_CHUNK) if storage == FULL else (LOW_REDUCE_CHUNK, LOW_APPLY_CHUNK)


def width(dtypes: list[torch.dtype]) -> int:
    """The number of elements that a thread moves at a time: of the widest dtype, so that it is the same for all."""
    return ACCESS // max(dtype.itemsize for dtype in dtypes)


@cache
def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
