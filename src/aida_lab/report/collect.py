"""Run folders as values: what a report needs from each run, and why a run is excluded."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from aida_lab.runs.checks import best_and_last, finite
from aida_lab.runs.files import StoreError, one_line
from aida_lab.runs.records import RunRecord, RunState, read_curve, read_sessions, scan
from aida_lab.spec import Experiment, Metric, RunSpec

_Rows = list[dict[str, Any]]

#: In the place of a commit or a version that the run's folder does not name.
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Curve:
    """A run's values per epoch; None if a value is missing or not finite."""

    epochs: tuple[int, ...] = ()
    metric: tuple[float | None, ...] = ()
    loss: tuple[float | None, ...] = ()
    seconds: tuple[float | None, ...] = ()
    steps: tuple[float | None, ...] = ()  #: training steps so far


@dataclass(frozen=True)
class Run:
    """One run folder whose spec could be read."""

    folder: Path
    spec: RunSpec
    #: That of the folder, or one of two more. ``other metric``: finished, but measured by another metric than its
    #: experiment declares. ``two results``: its copies have different results.
    state: RunState | Literal["other metric", "two results"]
    curve: Curve
    declared: Metric | None = None  #: as its experiment declares it; None if that is not known here
    metric: str = ""  #: the metric's key, from the run's result; empty without a result
    better: str = ""  #: its direction, "higher" or "lower"
    best: float | None = None
    best_epoch: int | None = None
    last: float | None = None
    device: str = ""
    commits: tuple[str, ...] = (NOT_RECORDED,)  #: distinct commits of the processes that trained it
    torch: tuple[str, ...] = (NOT_RECORDED,)  #: their distinct versions of torch
    shared: bool = False  #: whether another run may have used the same GPU or CPU at the same time
    #: GPU, start and end of each process, as far as known: until the next start, or as long as all epochs took.
    on_gpu: tuple[tuple[str, float, float], ...] = ()
    remark: str = ""  #: why it is excluded

    @property
    def key(self) -> str:
        """The spec's hash, which is the folder's name."""
        return self.folder.name

    @property
    def counts(self) -> bool:
        """Whether its number counts in a mean; all other runs are listed as excluded."""
        return self.state == "finished" and self.best is not None and self.last is not None

    @property
    def so_far(self) -> tuple[str, float | None, int | None, float | None]:
        """Metric, best value, its epoch and last value: those of the result, or of the epochs so far."""
        if self.metric or self.declared is None:
            return self.metric, self.best, self.best_epoch, self.last
        key = self.declared.key
        points = zip(self.curve.epochs, self.curve.metric, strict=True)
        rows = [{"epoch": epoch, key: value} for epoch, value in points if value is not None]
        return key, *best_and_last(self.declared, rows)

    @property
    def done(self) -> int:
        """The number of epochs on its curve."""
        return self.curve.epochs[-1] if self.curve.epochs else 0

    @property
    def median_seconds(self) -> float | None:
        """Training seconds per epoch: the median, which a slow first epoch (compiling, warming up) does not change."""
        known = [value for value in self.curve.seconds if value is not None]
        return statistics.median(known) if known else None

    @property
    def seconds(self) -> float | None:
        """The same; None if other runs shared the device, because the time then depends on them."""
        return None if self.shared else self.median_seconds


@dataclass(frozen=True)
class Unread:
    """A folder that adds no run: it cannot be read, or it is a copy of another run."""

    folder: Path
    problem: str


@dataclass(frozen=True)
class Collection:
    runs: tuple[Run, ...]
    unread: tuple[Unread, ...]


def read_runs(roots: Sequence[Path], experiments: Mapping[str, Experiment]) -> Collection:
    """Every run below the roots. Copies of a run count once; if their results differ, none counts."""
    copies: dict[str, list[RunRecord]] = {}
    unread: list[Unread] = []
    for record in {os.path.realpath(record.path): record for root in roots for record in scan(root)}.values():
        if record.spec is None:
            unread.append(Unread(record.path, record.problem or "being made just now, without a spec yet"))
        else:
            copies.setdefault(record.path.name, []).append(record)
    runs = []
    for found in copies.values():
        # the same copy is taken in any order of the roots
        first, *others = sorted(found, key=lambda each: (each.result is None, -each.rows, os.path.realpath(each.path)))
        run = run_of(first, experiments)
        ended = [each for each in (first, *others) if each.result is not None]
        if any(each.result != first.result for each in ended):
            said = "; ".join(f"{each.path}: {_ending(each.result)}" for each in ended)
            run = replace(run, state="two results", remark=f"its copies ended differently, so none counts: {said}")
        runs.append(run)
        for each in others:
            why = each.problem if each.state == "damaged" else "counted once"
            why = "with another result" if each.result not in (None, first.result) else why
            unread.append(Unread(each.path, f"the same run as {first.path}, {why}"))
    return Collection(tuple(_not_alone(runs)), tuple(unread))


def _ending(result: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {one_line((result or {}).get(name), 40)}" for name in ("state", "best", "last"))


def _not_alone(runs: Iterable[Run]) -> Iterable[Run]:
    """The runs, marked if another run, perhaps of another command, used a GPU of that name at the same time."""
    runs = tuple(runs)
    times = sorted((*time, run.key) for run in runs for time in run.on_gpu)
    shared: set[str] = set()
    latest = ("", -math.inf, "")  #: device, latest end on it so far, and the key of that run
    for device, start, end, key in times:
        if device == latest[0] and start < latest[1] and key != latest[2]:
            shared |= {key, latest[2]}
        if device != latest[0] or end > latest[1]:
            latest = (device, end, key)
    return (replace(run, shared=True) if run.key in shared else run for run in runs)


def run_of(record: RunRecord, experiments: Mapping[str, Experiment]) -> Run:
    """A record whose spec could be read, as a run."""
    spec, result = record.spec, record.result or {}
    assert spec is not None
    experiment = experiments.get(spec.experiment)
    declared = experiment.metrics.get(spec.variant) if experiment else None
    state: Any = record.state
    metric = str(result.get("metric", ""))
    best, last = finite(result.get("best")), finite(result.get("last"))
    remark = record.problem or one_line(result.get("reason", ""))
    if record.result and declared and metric != declared.key:
        state = "other metric"
        remark = f"measured by {metric or 'nothing'}, where its experiment uses {declared.key}"
    elif state == "finished" and (best is None or last is None):
        remark = f"finished without a number for {metric or 'its metric'}"
    sessions, rows = _read(read_sessions, record.path), _read(read_curve, record.path)
    versions = (each.get("versions") for each in sessions)
    names = (declared.key if declared else metric, "loss", "seconds", "step")
    values = (tuple(finite(row.get(name)) for row in rows) for name in names)
    return Run(
        folder=record.path, spec=spec, state=state, declared=declared,
        curve=Curve(tuple(row["epoch"] for row in rows), *values), metric=metric, better=str(result.get("better", "")),
        best=best, best_epoch=result.get("best_epoch"), last=last,
        device=one_line(sessions[-1].get("device", ""), 100) if sessions else "",
        commits=_distinct(each.get("git") for each in sessions),
        torch=_distinct(each.get("torch") if isinstance(each, Mapping) else None for each in versions),
        shared=any(each.get("at_once", None if each.get("device_type") == "cuda" else 1) != 1 for each in sessions),
        on_gpu=_times(sessions, rows),
        remark=remark,
    )  # fmt: skip


def _read(reader: Callable[[Path], _Rows], folder: Path) -> _Rows:
    """The rows of its curve, or the processes that trained it; none if the file is damaged, which the record says."""
    try:
        return reader(folder)
    except StoreError:
        return []


def _times(sessions: _Rows, rows: _Rows) -> tuple[tuple[str, float, float], ...]:
    total = sum((finite(row.get(key)) or 0.0) for row in rows for key in ("seconds", "eval_seconds"))
    begun = [
        (one_line(each.get("device", ""), 100), start)
        for each in sessions
        if each.get("device_type") == "cuda" and (start := _moment(each.get("started"))) is not None
    ]
    ends = (*(start for _, start in begun[1:]), math.inf)
    return tuple((device, start, min(start + total, end)) for (device, start), end in zip(begun, ends, strict=False))


def _moment(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _distinct(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one_line(value or NOT_RECORDED, 100) for value in values)) or (NOT_RECORDED,)
