"""Read run folders and archives. Nothing is written, and running runs are not disturbed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aida_lab.runs import files
from aida_lab.runs.checks import check_epochs, check_result, check_spec
from aida_lab.runs.files import StoreError, is_archive, one_line, parse_json, read_object
from aida_lab.runs.lock import is_held
from aida_lab.spec import RunSpec

#: The files of a run's folder.
SPEC, ENV, RESULT, FAILED = "spec.json", "env.json", "result.json", "failed.json"
CURVE, STEPSIZES, CHECKPOINTS, LOCK = "curve.jsonl", "stepsizes.jsonl", "checkpoints", "lock"

RunState = Literal["finished", "diverged", "running", "stopped", "failed", "damaged"]
#: States of a run with a result.
DONE: tuple[RunState, ...] = ("finished", "diverged")

_KEY = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class RunRecord:
    """What the files of a run say."""

    path: Path
    state: RunState
    spec: RunSpec | None  #: None if it is damaged, or not written yet
    result: Mapping[str, Any] | None  #: the content of result.json, if the run is finished or diverged
    rows: int  #: number of epochs on the curve
    problem: str  #: why it failed, or which of its files is damaged
    changed: float  #: when its files last changed, in seconds since 1970


def holds_runs(path: Path) -> bool:
    """Whether :func:`scan` can read it: a folder of runs, or an archive of them."""
    return path.is_dir() or is_archive(path)


def scan(out: str | os.PathLike[str]) -> list[RunRecord]:
    """All runs in a folder, its archives among them, or in one archive; by key, damaged ones too. Only reads."""
    try:
        places = [Path(out)] if is_archive(Path(out)) else [Path(out, name) for name in os.listdir(out)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{out} cannot be listed: {error.strerror or error}") from error
    records = []
    for place in places:
        with suppress(FileNotFoundError):  # removed while it is read
            if is_archive(place):
                records += _read_archived(place)
            elif _is_run(place):
                records.append(read_run(place))
    return sorted(records, key=lambda record: record.path.name)


def _is_run(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode) and bool(_KEY.fullmatch(path.name) or os.path.lexists(path / SPEC))
    except FileNotFoundError:
        return False
    except OSError:
        return bool(_KEY.fullmatch(path.name))  # a loop of links: reading it gives the reason


def _read_archived(path: Path) -> list[RunRecord]:
    try:
        keys = {name.partition("/")[0] for name in files.read_archive(path)}
    except StoreError as error:
        return [RunRecord(path, "damaged", None, None, 0, one_line(error), os.lstat(path).st_mtime)]
    return [read_run(path / key) for key in keys]


def read_run(path: Path) -> RunRecord:
    """Read one run."""
    # before its files: if the holder ends in between, all its files are read as it left them
    held = is_held(path / LOCK)
    changed = _changed(path)
    state: RunState
    spec, result, problem = None, None, ""
    rows: list[dict[str, Any]] = []
    try:
        spec = _spec_of(path, held)
        result = read_result(path)  # before the curve, which is complete if there is a result
        failed = read_object(path / FAILED)
        rows, torn = read_rows(path)
        if result is not None:
            state = result["state"]
            check_complete(path, spec, result, rows, torn)
        elif held:
            state = "running"
        elif failed is not None:
            state, problem = "failed", one_line(failed.get("error", ""))
        else:
            state = "stopped"
    except StoreError as error:
        state, result, problem = "damaged", None, one_line(str(error).removeprefix(f"{path}{os.sep}"))
    return RunRecord(path, state, spec, result, len(rows), problem, changed)


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's curve. An incomplete last line is being written, or was cut off, and is ignored."""
    return read_rows(path)[0]


def read_result(path: Path) -> dict[str, Any] | None:
    """A run's result; None if the run has not ended."""
    result = read_object(path / RESULT)
    if result is not None and result.get("state") not in DONE:
        raise StoreError(f"{path / RESULT} is damaged: its state is {result.get('state')!a}")
    return result


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """The environments of the processes that trained a run, in their order."""
    content = read_object(path / ENV)
    sessions = [] if content is None else content.get("sessions")
    if not isinstance(sessions, list) or not all(isinstance(each, dict) for each in sessions):
        raise StoreError(f"{path / ENV} is damaged: it has no list of sessions")
    return sessions


def _spec_of(path: Path, held: bool) -> RunSpec | None:
    content = read_object(path / SPEC)
    if content is None:
        if held:
            return None  # being created
        raise StoreError(f"{path / SPEC} is not there: stopped before it began, or not a run's folder")
    try:
        check_spec(content)
        spec = RunSpec.from_json(content)
        key = spec.key
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path / SPEC} is damaged, or of another version: {error}") from None
    if key != path.name:  # a copy would count as another run
        raise StoreError(f"{path / SPEC} belongs in a folder named {key}: copied, renamed or edited")
    return spec


def read_rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows of the curve, and whether an incomplete line follows them."""
    content = files.read_regular(path / CURVE, files.CURVE_LIMIT)
    if content is None:
        return [], False
    *lines, rest = content.split(b"\n")
    try:
        # all lines at once is twice as fast as line by line, which is needed only to name a bad one
        if (rows := _parse(lines)) is None:
            bad = next((number for number, line in enumerate(lines, start=1) if _parse([line]) is None), 1)
            raise ValueError(f"line {bad} is no row")
        check_epochs(rows)
    except ValueError as error:
        raise StoreError(f"{path / CURVE} is damaged: {error}") from None
    return rows, bool(rest)


def _parse(lines: list[bytes]) -> list[dict[str, Any]] | None:
    """The JSON object in each line; None if a line holds anything else."""
    with suppress(ValueError):
        rows = parse_json(b"[%s]" % b",".join(lines))
        return rows if len(rows) == len(lines) and all(type(row) is dict for row in rows) else None
    return None


def check_complete(
    path: Path, spec: RunSpec | None, result: Mapping[str, Any], rows: list[dict[str, Any]], torn: bool
) -> None:
    """StoreError if the curve of a run that ended is incomplete, or does not give its result."""
    if result["state"] == "finished":
        if len(rows) != result.get("epochs"):
            counted = one_line(ascii(result.get("epochs")), 40)
            raise StoreError(f"{path / CURVE} ends with epoch {len(rows)}, and {RESULT} counts {counted}")
        if torn:
            raise StoreError(f"{path / CURVE} is cut off after epoch {len(rows)}, within a line")
        if spec is not None and len(rows) != spec.epochs:
            raise StoreError(f"{path / CURVE} ends with epoch {len(rows)}, and {SPEC} asks for {spec.epochs}")
    try:
        check_result(result, rows)
    except ValueError as error:
        raise StoreError(f"{path / RESULT} does not fit {CURVE}: {error}") from None


def _changed(path: Path) -> float:
    times = []
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.name != LOCK:  # written even if the run is found finished
                with suppress(OSError):  # a running run renames and removes files
                    times.append(entry.stat(follow_symlinks=False).st_mtime)
    return max(times) if times else os.lstat(path.parent if is_archive(path.parent) else path).st_mtime
