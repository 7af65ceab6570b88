"""The best, the last value and the speed of a run, from its folder and in any state."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from aida_lab.experiments import experiments
from aida_lab.runs.checks import best_and_last, finite
from aida_lab.runs.files import StoreError
from aida_lab.runs.records import RunRecord, read_curve


@dataclass(frozen=True)
class Summary:
    """Unknown values are None."""

    metric: str = ""
    best: float | None = None
    best_epoch: int | None = None
    last: float | None = None
    #: Training seconds per epoch: the median, because the first epoch compiles and warms up.
    seconds: float | None = None


def summary_of(record: RunRecord) -> Summary:
    """The values of the result, or of the epochs so far."""
    experiment = experiments().get(record.spec.experiment) if record.spec else None
    metric = experiment.metrics.get(record.spec.variant) if record.spec and experiment else None
    if metric is None:
        return Summary()
    try:
        rows = read_curve(record.path)
    except StoreError:
        rows = []
    times = [known for row in rows if (known := finite(row.get("seconds"))) is not None]
    if record.result is None or record.result.get("metric") != metric.key:
        rows = [row for row in rows if finite(row.get(metric.key)) is not None]  # last: the last that was measured
    best, best_epoch, last = best_and_last(metric, rows)
    return Summary(metric.key, finite(best), best_epoch, finite(last), median(times) if times else None)
