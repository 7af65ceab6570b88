"""The processes that torchrun starts: who is who, and what they tell one another. One process alone is rank 0 of 1."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def join(device: torch.device) -> torch.device:
    """Join those that torchrun started, until this process ends; returns the device of this one.

    Without torchrun nothing happens, and the device is the given one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return device
    if device.type == "cuda":
        number, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if number >= there:
            raise ValueError(
                f"process {number} of this machine has no GPU of its own, there are {there}; "
                f"start torchrun with --nproc-per-node {there}"
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # not for each run: torchrun's store would give a second group the addresses of the first
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)
    return device


def _leave() -> None:
    """Leave together: a process whose peer is gone already may be aborted by gloo."""
    dist.barrier()
    dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if _together() else 0


def world() -> int:
    """How many processes train one model together."""
    return dist.get_world_size() if _together() else 1


def is_main() -> bool:
    """Whether this process is the one that writes."""
    return rank() == 0


def barrier() -> None:
    """Wait for all."""
    if _together():
        dist.barrier()


def total(value: Tensor) -> Tensor:
    """The sum over all processes, the same in each; ``value`` is overwritten where there are several."""
    if _together():
        dist.all_reduce(value)
    return value


def mean(value: Tensor) -> Tensor:
    """The mean over all processes, the same in each; ``value`` is overwritten where there are several."""
    return total(value).div_(world()) if _together() else value


def said_by_main(value: Any) -> Any:
    """What the main process passes, in all of them; a value that can be pickled."""
    if not _together():
        return value
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def any_of_us(condition: bool, device: torch.device) -> bool:
    """Whether it holds in one of the processes at least."""
    return bool(total(torch.tensor(float(condition), device=device))) if _together() else condition


def take_from_main(tensors: Iterable[Tensor]) -> None:
    """Overwrite each with what the main process has."""
    if _together():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()
