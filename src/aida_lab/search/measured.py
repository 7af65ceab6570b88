"""The result of a run as a trial stores it: enough for every table on any machine, without the run's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from aida_lab.search.plan import By
from aida_lab.spec import Metric

MeasuredState = Literal["finished", "diverged", "pruned"]


@dataclass(frozen=True)
class Measured:
    """The result of a run that finished, diverged or was pruned."""

    #: The key of the run's spec.
    run: str
    state: MeasuredState
    best: float | None
    best_epoch: int | None
    last: float | None
    folder: str
    host: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Measured:
        return cls(**content)

    def value(self, by: By, metric: Metric) -> float:
        """The value to compare runs by. A diverged run is worse than any other."""
        worst = -math.inf if metric.better == "higher" else math.inf
        found = self.best if by == "best" else self.last
        return worst if self.state == "diverged" or found is None or not math.isfinite(found) else found
