"""Run folders as values: what a report needs from each run, and why a run is excluded."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from aida_lab.runs.checks import finite
from aida_lab.runs.files import one_line
from aida_lab.runs.store import RunRecord, StoreError, read_curve, read_sessions, scan
from aida_lab.spec import Experiment, RunSpec

#: The store's states, and two more. ``other metric``: finished, but measured by another metric than its experiment
#: declares. ``two results``: its copies have different results.
State = Literal["finished", "diverged", "running", "stopped", "failed", "damaged", "other metric", "two results"]

#: In the place of a commit or a version that the run's folder does not name.
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Curve:
    """A run's values per epoch; None if a value is missing or not finite."""

    epochs: tuple[int, ...] = ()
    metric: tuple[float | None, ...] = ()
    loss: tuple[float | None, ...] = ()
    seconds: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run folder whose spec could be read."""

    folder: Path
    spec: RunSpec
    state: State
    curve: Curve
    #: The metric's key and direction from the run's result; empty without a result.
    metric: str = ""
    better: str = ""
    best: float | None = None
    best_epoch: int | None = None
    last: float | None = None
    device: str = ""
    #: Distinct commits and torch versions of the processes that trained it.
    commits: tuple[str, ...] = (NOT_RECORDED,)
    torch: tuple[str, ...] = (NOT_RECORDED,)
    #: Whether another run may have used the same GPU or CPU at the same time.
    shared: bool = False
    #: GPU, start and end of each process, as far as known: until the next start, or as long as all epochs took.
    on_gpu: tuple[tuple[str, float, float], ...] = ()
    #: Why it is excluded.
    remark: str = ""

    @property
    def key(self) -> str:
        """The spec's hash, which is the folder's name."""
        return self.folder.name

    @property
    def counts(self) -> bool:
        """Whether its number counts in a mean; all other runs are listed as excluded."""
        return self.state == "finished" and self.best is not None and self.last is not None

    @property
    def seconds(self) -> float | None:
        """Training seconds per epoch: the median, which a slow first epoch (compiling, warming up) does not change.

        None if other runs shared the device, because the time then depends on them.
        """
        if self.shared:
            return None
        known = [value for value in self.curve.seconds if value is not None]
        return statistics.median(known) if known else None


@dataclass(frozen=True)
class Unread:
    """A folder that adds no run: it cannot be read, or it is a copy of another run."""

    folder: Path
    problem: str


@dataclass(frozen=True)
class Collection:
    runs: tuple[Run, ...]
    unread: tuple[Unread, ...]


def collect(roots: Sequence[Path], experiments: Mapping[str, Experiment]) -> Collection:
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
        assert first.spec is not None
        run = _run(first, first.spec, experiments)
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


def _run(record: RunRecord, spec: RunSpec, experiments: Mapping[str, Experiment]) -> Run:
    experiment = experiments.get(spec.experiment)
    declared = experiment.metrics.get(spec.variant) if experiment else None
    result = record.result or {}
    state: State = record.state
    remark = record.problem or one_line(result.get("reason", ""))
    metric = str(result.get("metric", ""))
    if record.result and declared and metric != declared.key:
        state, remark = (
            "other metric",
            f"measured by {metric or 'nothing'}, where its experiment goes by {declared.key}",
        )
    best, last = finite(result.get("best")), finite(result.get("last"))
    sessions = _sessions(record.path)
    rows = _rows(record.path)
    if state == "finished" and (best is None or last is None):
        remark = f"finished without a number for {metric or 'its metric'}"
    return Run(
        folder=record.path, spec=spec, state=state,
        curve=_curve(rows, declared.key if declared else metric),
        metric=metric, better=str(result.get("better", "")),
        best=best, best_epoch=result.get("best_epoch"), last=last,
        device=one_line(sessions[-1].get("device", ""), 100) if sessions else "",
        commits=_distinct(each.get("git") for each in sessions),
        torch=_distinct(_torch(each.get("versions")) for each in sessions),
        shared=any(each.get("at_once", None if each.get("device_type") == "cuda" else 1) != 1 for each in sessions),
        on_gpu=_times(sessions, rows),
        remark=remark,
    )  # fmt: skip


def _rows(folder: Path) -> Sequence[Mapping[str, Any]]:
    """The rows of its curve, one per epoch; none if it cannot be read, which the record then says."""
    try:
        return read_curve(folder)
    except StoreError:
        return ()


def _curve(rows: Sequence[Mapping[str, Any]], metric: str) -> Curve:
    return Curve(
        tuple(row["epoch"] for row in rows),
        tuple(finite(row.get(metric)) for row in rows),
        tuple(finite(row.get("loss")) for row in rows),
        tuple(finite(row.get("seconds")) for row in rows),
    )


def _times(
    sessions: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> tuple[tuple[str, float, float], ...]:
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


def _sessions(folder: Path) -> Sequence[Mapping[str, Any]]:
    """The processes that trained it, in order; none if not recorded."""
    try:
        return read_sessions(folder)
    except StoreError:
        return ()


def _distinct(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one_line(value or NOT_RECORDED, 100) for value in values)) or (NOT_RECORDED,)


def _torch(versions: Any) -> Any:
    return versions.get("torch") if isinstance(versions, Mapping) else None
