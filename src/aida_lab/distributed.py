"""Processes started by torchrun: ranks and collectives. A process without torchrun is rank 0 of 1."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def join(device: torch.device) -> torch.device:
    """Join the process group of torchrun until this process ends; returns the device of this rank.

    Without torchrun, do nothing and return ``device``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return device
    if device.type == "cuda":
        local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local_rank >= gpus:
            raise ValueError(
                f"local rank {local_rank} has no GPU: this machine has {gpus}; "
                f"start torchrun with --nproc-per-node {gpus}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # once per process: a second group would get the addresses of the first from torchrun's store
        store, number, count = next(dist.rendezvous("env://"))  # type: ignore[attr-defined] # public, not exported
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=number, world_size=count)
        atexit.register(_leave, store, count)
    return device


def _leave(store: Any, count: int) -> None:
    """Wait for all ranks first: gloo may abort a process whose peer has exited.

    Not in a barrier: a rank that failed alone must end, so that torchrun stops the others, which are in a collective.
    """
    with suppress(dist.DistError):  # the store is gone
        gone, limit = store.add("gone", 1), time.monotonic() + 60.0
        while gone < count and time.monotonic() < limit:
            time.sleep(0.1)
            gone = store.add("gone", 0)
        if gone == count:
            dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if _together() else 0


def world() -> int:
    """The number of processes that train one model together."""
    return dist.get_world_size() if _together() else 1


def is_main() -> bool:
    """Whether this is rank 0, the only process that writes files."""
    return rank() == 0


def total(value: Tensor) -> Tensor:
    """The sum over all ranks, on every rank. ``value`` is overwritten if there are several ranks."""
    if _together():
        dist.all_reduce(value)
    return value


def mean(value: Tensor) -> Tensor:
    """The mean over all ranks, on every rank. ``value`` is overwritten if there are several ranks."""
    return total(value).div_(world()) if _together() else value


def broadcast(value: Any) -> Any:
    """The value of rank 0, on every rank. It must be picklable."""
    if not _together():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def any_rank(*conditions: bool, device: torch.device) -> tuple[bool, ...]:
    """For each condition, whether it holds on at least one rank."""
    return tuple(total(torch.tensor(conditions, device=device).int()).bool().tolist()) if _together() else conditions


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor with that of rank 0."""
    if _together():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()
