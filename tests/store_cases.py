"""What the tests of the run store share: a spec, a run that saves after every step, full disks, processes to kill."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from aida_lab.runs.checkpoints import checkpoint_files
from aida_lab.runs.store import RunFolder
from aida_lab.spec import RunSpec

SPEC = RunSpec("digits", "adam", {"lr": 1e-3, "betas": [0.9, 0.999]}, seed=0, epochs=2, batch=64, precision="fp32")
RESULT = {
    "state": "finished", "metric": "loss", "better": "lower", "best": 0.5, "best_epoch": 2, "last": 0.5, "epochs": 2,
}  # fmt: skip

#: Processes that begin as forks of a clean one with torch loaded: twenty of them start in the time of one.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "pytest", "aida_lab.runs.store"])


def weights_at(step: int, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(step))


def advance(folder: RunFolder, step: int, size: int = 4) -> None:
    """One step of a run: a row, a stepsize record, a checkpoint."""
    folder.append_row({"epoch": step, "loss": 1 / step})
    with (folder.path / "stepsizes.jsonl").open("a") as file:
        file.write(f'{{"step": {step}}}\n')
    folder.save({"step": step, "weights": weights_at(step, size)}, step)


def files_in(path: Path) -> list[str]:
    """Names of all files under a folder."""
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


def checkpoints(folder: RunFolder) -> list[Path]:
    """The newest first."""
    return [file.path for file in checkpoint_files(folder.path / "checkpoints")]


def reopened(folder: RunFolder) -> RunFolder:
    """As the next process finds it."""
    folder.close()
    return RunFolder.open(folder.path.parent, SPEC)


def silently_loaded(folder: RunFolder) -> dict[str, Any] | None:
    """Its state, with any warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return folder.load()


def work(out: Path, steps: int, said: Connection) -> None:
    """A run from wherever it stands to ``steps``; says each step that is saved."""
    with RunFolder.open(out, SPEC) as folder:
        state = folder.load() or {"step": 0}
        for step in range(state["step"] + 1, steps + 1):
            advance(folder, step, size=500_000)
            said.send(step)
        folder.finish({**RESULT, "epochs": steps})


def hold(out: Path, said: Connection) -> None:
    """Open the run, and stay."""
    with RunFolder.open(out, SPEC):
        said.send(os.getpid())
        said.recv()


def hold_with_a_fork(out: Path, said: Connection) -> None:
    """Open the run, fork a process that stays, as a loader's workers do, and stay."""
    with RunFolder.open(out, SPEC):
        child = os.fork()
        if child == 0:
            said.poll(60)
            os._exit(0)
        said.send(child)
        said.poll(60)


@contextmanager
def process(
    target: Callable[..., None], *args: object
) -> Iterator[tuple[multiprocessing.process.BaseProcess, Connection]]:
    """A process of its own and what it says; killed at the end where it still runs."""
    here, there = PROCESSES.Pipe()
    child = PROCESSES.Process(target=target, args=(*args, there))
    child.start()
    there.close()
    try:
        yield child, here
    finally:
        child.kill()
        child.join()
        here.close()


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: EFBIG from the system itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def refusing_writes(after: int) -> Iterator[None]:
    """os.write as on a disk that fills up: a part of the data, then ENOSPC."""
    real, left = os.write, after

    def write(descriptor: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = real(descriptor, data[:left])
        left -= taken
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        yield


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A file system of its own at ``folder``; the test is skipped where we may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system of a few megabytes cannot be mounted here: {error}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
