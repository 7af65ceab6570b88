"""Checks of a command's arguments. An invalid argument ends the command with one line, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aida_lab.cli.printing import fail

if TYPE_CHECKING:
    from aida_lab.spec import Experiment


def chosen_experiment(name: str | None, command: str) -> Experiment:
    from aida_lab.experiments import experiments, find_experiment

    if name is None:
        fail(f"which experiment? aida {command} EXPERIMENT; known are {', '.join(experiments())}")
    return find_experiment(name)


def require_known(option: str, value: str | None, known: Sequence[str]) -> None:
    """End the command if an option was given a word that it does not know."""
    if value is not None and value not in known:
        fail(f"{option} {value!r} is not known; known: {', '.join(known)}")


def require_data(names: Sequence[str], root: Path | None) -> None:
    """End the command if a data set is missing."""
    from aida_lab.data.local import require
    from aida_lab.data.sets import find

    for name in names:
        require(find(name), root)


def require_runs(folders: Iterable[Path]) -> None:
    """End the command if one of them is neither a folder nor an archive of runs."""
    from aida_lab.runs.records import holds_runs

    for folder in folders:
        if not holds_runs(folder):
            fail(f"no runs at {folder}: it is not a folder; aida train EXPERIMENT writes runs, by default into runs")


def require_writable(out: Path) -> None:
    """End the command if no file can be created in ``out``, or in its nearest existing parent if it is missing."""
    from tempfile import TemporaryFile

    existing = next((path for path in (out, *out.absolute().parents) if os.path.lexists(path)), out)
    try:
        with TemporaryFile(dir=existing):
            pass
    except OSError as error:
        fail(f"cannot write to {out}: {error.strerror}; choose another folder with --out")
