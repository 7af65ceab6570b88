"""A run in a few numbers, from its folder, whatever state it is in."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from aida_lab.experiments import experiments
from aida_lab.runs.checks import finite
from aida_lab.runs.store import RunRecord, StoreError, read_curve


@dataclass(frozen=True)
class Summary:
    """What is not known is None."""

    metric: str = ""
    best: float | None = None
    best_epoch: int | None = None
    last: float | None = None
    #: Seconds an epoch of training, the median over the curve: the first epoch compiles and warms up.
    seconds: float | None = None


def summary_of(record: RunRecord) -> Summary:
    """Best and last as the result has them, or of the epochs so far."""
    experiment = experiments().get(record.spec.experiment) if record.spec else None
    metric = experiment.metrics.get(record.spec.variant) if record.spec and experiment else None
    if metric is None:
        return Summary()
    try:
        rows = read_curve(record.path)
    except StoreError:
        rows = []
    times = [known for row in rows if (known := finite(row.get("seconds"))) is not None]
    seconds = median(times) if times else None
    result = record.result
    if result is not None and result.get("metric") == metric.key:
        best, last = finite(result.get("best")), finite(result.get("last"))
        return Summary(metric.key, best, result.get("best_epoch"), last, seconds)
    best, best_epoch, last = None, None, None
    for row in rows:
        value = finite(row.get(metric.key))
        if value is None:
            continue
        last = value
        if metric.improves(value, best):
            best, best_epoch = value, row["epoch"]
    return Summary(metric.key, best, best_epoch, last, seconds)
