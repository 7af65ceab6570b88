"""Results of a search: of each run, of all configurations, of the best one and its repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from aida_lab.report.statistics import MeanStd, mean_std
from aida_lab.runs.files import write_object, writing
from aida_lab.search.plan import By, Plan
from aida_lab.search.space import Params
from aida_lab.spec import Metric, RunSpec


@dataclass(frozen=True)
class Measured:
    """The result of a run as its trial stores it: enough for every table on any machine, without the run's folder."""

    run: str  #: the key of the run's spec
    state: Literal["finished", "diverged", "pruned"]
    best: float | None
    best_epoch: int | None
    last: float | None
    folder: str
    host: str

    def value(self, by: By, metric: Metric) -> float:
        """The value to compare runs by. A diverged run is worse than any other."""
        worst = -math.inf if metric.better == "higher" else math.inf
        found = self.best if by == "best" else self.last
        return worst if self.state == "diverged" or found is None or not math.isfinite(found) else found


@dataclass(frozen=True)
class Row:
    """The current state of one configuration."""

    params: Params
    spec: RunSpec
    measured: Measured | None  #: None if it is not measured yet
    state: str  #: one word
    problem: str = ""  #: the reason if it is not measured


@dataclass(frozen=True)
class Findings:
    """The current results of a search, which may still be incomplete."""

    plan: Plan
    rows: Sequence[Row]
    best: Row | None  #: None if a configuration is not measured yet, or if none finished
    repetitions: Sequence[Row]

    @property
    def complete(self) -> bool:
        """Whether every configuration and every repetition is measured."""
        return self.best is not None and bool(self.repetitions) and all(row.measured for row in self.repetitions)

    @property
    def diverged(self) -> int:
        """Number of repetitions that diverged. The mean excludes them."""
        return sum(row.state == "diverged" for row in self.repetitions)

    @property
    def next_best(self) -> Row | None:
        """The second-best configuration, to repeat if the best one diverges at full length."""
        return best_of([row for row in self.rows if row is not self.best], self.plan)

    def spread(self, by: By) -> MeanStd | None:
        """Mean and deviation over the repetitions; None if none finished."""
        values = [row.measured.value(by, self.plan.metric) for row in self.repetitions if row.measured]
        finite = [value for value in values if math.isfinite(value)]
        return mean_std(finite) if finite else None

    def problems(self) -> list[str]:
        """One line per failed run."""
        return [
            f"{row.spec.key} {row.state}: {row.problem}"
            for row in (*self.rows, *self.repetitions)
            if row.state == "failed"
        ]

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "study": plan.name,
            "experiment": plan.base.experiment,
            "method": plan.method,
            "metric": plan.metric.key,
            "better": plan.metric.better,
            "complete": self.complete,
            **plan.about(),
            "search_epochs": plan.base.epochs,
            "repetition_epochs": plan.repetition(plan.base, 0).epochs,
            "shortened": plan.shortened,
            "configurations": [{**_row(row), "winner": row is self.best} for row in self.rows],
            "repetitions": [_row(row) for row in self.repetitions],
            "repeated": {by: asdict(found) for by in ("best", "last") if (found := self.spread(by)) is not None},
        }

    def write(self, out: Path) -> Path:
        """Write the JSON file of the search next to the runs and return its path."""
        path = out / "search" / f"{self.plan.name}.json"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_object(path, self.to_json())
        return path


def best_of(rows: Sequence[Row], plan: Plan) -> Row | None:
    """The best configuration, the first one on ties; None if none finished."""
    best: tuple[float, Row] | None = None
    for row in rows:
        if row.measured is None or row.measured.state != "finished":
            continue
        value = row.measured.value(plan.by, plan.metric)
        if math.isfinite(value) and plan.metric.improves(value, best[0] if best else None):
            best = (value, row)
    return best[1] if best else None


def _row(row: Row) -> dict[str, Any]:
    return {
        "values": dict(row.params),
        "run": row.spec.key,
        "seed": row.spec.seed,
        "state": row.state,
        **{name: getattr(row.measured, name, None) for name in ("best", "best_epoch", "last", "folder", "host")},
        **({"problem": row.problem} if row.problem else {}),
    }
