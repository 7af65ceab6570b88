"""Runs that their search may give up: a word from the process that decides to the one that trains."""

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

#: For :class:`aida_lab.workers.jobs.Jobs`: trains as ever, and leaves a run that was given up.
RUNNER = f"{__name__}:run"

#: The state of such a run's outcome.
PRUNED = "pruned"


class _GivenUp(Exception):  # noqa: N818 - nothing went wrong
    """The run is not wanted any more."""


def give_up(out: Path, run: str) -> None:
    """Have whoever trains the run leave it after the epoch at hand; its curve stays, its checkpoints go."""
    word = _word(out, run)
    word.parent.mkdir(parents=True, exist_ok=True)
    word.touch()


def run(spec: RunSpec, out: Path, options: Options, listen: Listener) -> Mapping[str, Any]:
    """Train a run unless it is given up on the way."""
    word = _word(out, spec.key)
    word.unlink(missing_ok=True)  # of a process that was killed before it read it

    def hear(event: Event) -> None:
        listen(event)
        if event.kind == "epoch" and event.epoch < event.epochs and word.exists():
            raise _GivenUp

    try:
        return training_run.run(spec, out, options, hear)
    except _GivenUp:
        with suppress(RunBusyError), RunFolder.open(out, spec) as folder:
            folder.drop_checkpoints()
        return {"state": PRUNED}
    finally:
        word.unlink(missing_ok=True)


def _word(out: Path, run: str) -> Path:
    # a file: the process that trains may be another, whose pipe takes whole runs only
    return out / "search" / f"{run}.given-up"
