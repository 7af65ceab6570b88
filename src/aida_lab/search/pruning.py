"""Prune runs: the process that searches leaves a marker file, and the process that trains stops the run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from aida_lab.events import Event, Listener
from aida_lab.runs.store import RunBusyError, RunFolder
from aida_lab.spec import RunSpec
from aida_lab.training import run as training_run
from aida_lab.training.options import Options

#: For :class:`aida_lab.workers.jobs.Jobs`: trains a run and stops it if it is pruned.
RUNNER = f"{__name__}:run"


class _Pruned(Exception):  # noqa: N818 - not an error
    """The run was pruned."""


def prune(out: Path, run: str) -> None:
    """Stop a run after its current epoch, in any process. Its curve is kept, its checkpoints are deleted."""
    marker = _marker(out, run)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def run(spec: RunSpec, out: Path, options: Options, listen: Listener) -> Mapping[str, Any]:
    """Train a run until it ends or is pruned."""
    marker = _marker(out, spec.key)
    marker.unlink(missing_ok=True)  # left by a killed process

    def forward(event: Event) -> None:
        listen(event)
        if event.kind == "epoch" and event.epoch < event.epochs and marker.exists():
            raise _Pruned

    try:
        return training_run.run(spec, out, options, forward)
    except _Pruned:
        with suppress(RunBusyError), RunFolder.open(out, spec) as folder:
            folder.drop_checkpoints()
        return {"state": "pruned"}
    finally:
        marker.unlink(missing_ok=True)


def _marker(out: Path, run: str) -> Path:
    # a file, because the pipe of a worker process carries only whole runs
    return out / "search" / f"{run}.given-up"
