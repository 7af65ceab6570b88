"""Several processes on this machine that talk over gloo or NCCL, each running functions of a test module."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 300.0  #: seconds until processes that wait for one another are given up
#: Imported once, by the server from which all processes are forked: importing torch takes seconds on a busy machine.
PRELOAD = (
    "pytest",
    "aida",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


@dataclass(frozen=True)
class Refused:
    """The error that ended a process's work."""

    kind: str
    words: str


def together(
    *works: Callable[[], Any], ranks: int = 2, limit: float = LIMIT, device: str = "cpu", backend: str = "gloo"
) -> list[tuple[Any, ...]]:
    """For each function what it returned in each process, or :class:`Refused`; a process that dies fails the test."""
    # CUDA does not work in a process that was forked from one in which CUDA was queried, as an import may do
    method = "forkserver" if device == "cpu" else "spawn"
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _one, (works, ranks, folder, device, backend), nprocs=ranks, join=False, start_method=method
        )
        end = time.monotonic() + limit
        try:
            while not context.join(timeout=1.0):
                assert time.monotonic() < end, f"the processes did not end within {limit:.0f} s"
        finally:
            for process in context.processes:
                process.kill()
        return list(
            zip(*(torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(ranks)), strict=True)
        )


def _one(rank: int, works: Sequence[Callable[[], Any]], ranks: int, folder: str, device: str, backend: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":  # ranks may share a GPU; torch would choose the device by LOCAL_RANK
        torch.cuda.set_device(rank % torch.cuda.device_count())
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "DS_ACCELERATOR": "cpu"}
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save([_outcome(work) for work in works], Path(folder, str(rank)))
    while not all(Path(folder, str(other)).exists() for other in range(ranks)):
        time.sleep(0.05)  # gloo may abort a process whose peer has exited


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return Refused(type(error).__name__, str(error))
