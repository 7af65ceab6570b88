"""Read runs while they train: the ends of their files, again whenever these change. Nothing is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aida.stepsizes import AcrossLayers, LayerStepsizes
from aida.stepsizes.sinks import read_record
from aida_lab.progress.labels import labels
from aida_lab.runs.checks import finite
from aida_lab.runs.files import one_line, open_regular, parse_json
from aida_lab.runs.lock import is_held
from aida_lab.runs.records import CURVE, FAILED, LOCK, RESULT, SPEC, STEPSIZES, RunRecord, read_run

#: Bytes of a file that are read, from its end: a measurement of 3,000 layers.
_TAIL = 2 << 20
#: Measurements in a trend. A layer that is absent from the last few is no longer shown.
_MEASUREMENTS, _RECENT = 60, 5
#: Runs shown at once, the ones that changed last; and columns of a curve.
_RUNS, _CURVES = 20, 6
#: Columns of a curve that are not drawn.
_BESIDE = ("epoch", "step", "lr", "seconds", "eval_seconds")


@dataclass(frozen=True)
class Watched:
    """What the files of a run say now."""

    name: str
    state: str = ""  #: of a run of the lab; empty for other training loops
    epochs: int | None = None
    epoch: int = 0  #: number of the last row on the curve
    #: Values per row of each column of the curve, such as the loss; None if a value is not finite.
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    #: The last records of each layer, from the first layer of the model on and from the newest record back.
    layers: Sequence[Sequence[LayerStepsizes]] = ()
    problem: str = ""  #: why something is missing, in one line
    changed: float | None = None  #: when its files last changed, in seconds since 1970; None if there are none


class Watcher:
    """Reads the runs at some paths, again and again.

    A path is a run's folder, a file of ``aida.JsonLines``, or a folder of these. It need not exist yet.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._known: dict[Path, tuple[Any, Watched]] = {}
        self.found = 0  #: runs at these paths, also those that are not shown

    def look(self) -> list[Watched]:
        """The runs as they are now, sorted by path; of many, those that changed last."""
        versions = {run: _version(run) for path in self._paths for run in _runs(path)}
        self.found = len(versions)
        latest = sorted(versions, key=lambda run: _changed(versions[run]), reverse=True)[:_RUNS]
        known, self._known = self._known, {}
        for run in sorted(latest):
            before = known.get(run)
            same = before is not None and before[0] == versions[run]
            self._known[run] = before if before and same else (versions[run], _read(run, versions[run]))
        return [watched for _, watched in self._known.values()]


def _runs(path: Path) -> list[Path]:
    """The path itself, or the runs in a folder of runs."""
    if os.path.isfile(path):
        return [Path(os.path.realpath(path))]  # a link that the user names is followed, a link in a folder is not
    if os.path.isdir(path) and not _is_run(path):
        with suppress(OSError):
            return [each for each in path.iterdir() if _is_run(each) or each.suffix == ".jsonl"] or [path]
    return [path]


def _is_run(path: Path) -> bool:
    return os.path.isdir(path) and any(os.path.lexists(path / name) for name in (STEPSIZES, CURVE, SPEC))


def _files(run: Path) -> tuple[Path, Path]:
    """The stepsizes and the curve of a run."""
    return (run / STEPSIZES, run / CURVE) if os.path.isdir(run) else (run, run.with_name(CURVE))


def _version(run: Path) -> tuple[Any, ...]:
    """Changes whenever a file of the run does."""
    files = (*_files(run), *(run / name for name in (SPEC, RESULT, FAILED)))
    return is_held(run / LOCK), *map(_status, files)


def _status(file: Path) -> tuple[float, int, int] | None:
    with suppress(OSError):
        found = os.lstat(file)
        return found.st_mtime, found.st_ino, found.st_size
    return None


def _changed(version: tuple[Any, ...]) -> float:
    return max((each[0] for each in version[1:] if each is not None), default=0.0)


def _read(run: Path, version: tuple[Any, ...]) -> Watched:
    stepsizes, curve = _files(run)
    found: dict[str, Any] = {"name": one_line(run, 200), "changed": _changed(version) or None}
    try:
        if os.path.lexists(run / SPEC):
            found |= _of_the_lab(read_run(run))
        found["layers"] = _histories(_last_lines(stepsizes))
        rows = [row for line in _last_lines(curve) if isinstance(row := _parsed(line), dict)]
        found |= {"curves": _curves(rows), "epoch": int(finite(rows[-1].get("epoch")) or 0) if rows else 0}
    except OSError as error:
        found["problem"] = one_line(f"{error.filename} cannot be read: {error.strerror or error}")
    return Watched(**found)


def _of_the_lab(record: RunRecord) -> dict[str, Any]:
    """What a run of ``aida train`` has besides stepsizes and a curve."""
    found: dict[str, Any] = {"state": record.state, "problem": record.problem}
    if record.spec is not None:
        (label,) = labels([record.spec]).values()
        found |= {"name": one_line(f"{record.spec.experiment} {label}"), "epochs": record.spec.epochs}
        if not record.spec.probe_every and not os.path.lexists(record.path / STEPSIZES):
            found["problem"] = record.problem or "no stepsizes: a run records them with aida train --probe"
    return found


def _last_lines(path: Path) -> list[bytes]:
    """The complete lines at the end of a file; none if there is no file. An incomplete line is being written."""
    try:
        with open(open_regular(path), "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - _TAIL)
            file.seek(start)
            lines = file.read(_TAIL).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return lines[1:] if start else lines


def _histories(lines: Sequence[bytes]) -> list[list[LayerStepsizes]]:
    """The records of each layer, from the newest back. Steps that a resumed run repeats, or a restarted one, count."""
    found: dict[str, list[LayerStepsizes]] = {}
    complete = 0
    for line in reversed(lines):
        try:
            record = read_record(line)
        except ValueError:
            continue
        if isinstance(record, AcrossLayers):
            complete += 1
            if complete > _MEASUREMENTS:
                break
        elif complete and (complete <= _RECENT or record.layer in found):  # before that, it is still being written
            known = found.setdefault(record.layer, [])
            if not known or record.step < known[-1].step:
                known.append(record)
    return list(reversed(found.values()))


def _parsed(line: bytes) -> Any:
    with suppress(ValueError):
        return parse_json(line)
    return None


def _curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for row in rows:
        for name, value in row.items():
            shown = name not in _BESIDE and (value is None or type(value) in (int, float))
            if shown and (name in found or len(found) < _CURVES):
                found.setdefault(name, []).append(finite(value))
    return {one_line(name, 30): values for name, values in found.items() if any(each is not None for each in values)}
