"""Means over seeds, one per configuration, from run records: what ``aida train`` ends with and ``aida runs`` shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aida_lab.cli.printing import console, mean_in_words, table

if TYPE_CHECKING:
    from aida_lab.report.statistics import MeanStd
    from aida_lab.runs.store import RunRecord
    from aida_lab.runs.summary import Summary
    from aida_lab.spec import RunSpec


@dataclass(frozen=True)
class Mean:
    """One configuration: runs that differ in the seed alone, and the mean of those that finished."""

    #: With seed 0 and without a probe.
    spec: RunSpec
    #: One state per seed.
    states: tuple[str, ...]
    metric: str
    best: MeanStd | None
    last: MeanStd | None

    @property
    def excluded(self) -> str:
        """The seeds that are not in the mean, in words."""
        lost = [state for state in self.states if state != "finished"]
        return ", ".join(f"{lost.count(state)} {state}" for state in dict.fromkeys(lost))


def without_seed(spec: RunSpec) -> RunSpec:
    """The spec that all runs of a configuration share. A probe changes no other number, so it is dropped too."""
    return replace(spec, seed=0, probe_every=0)


def means_of(runs: Iterable[tuple[RunRecord, Summary]]) -> list[Mean]:
    """One mean per configuration, ordered by experiment, the best score first."""
    from aida_lab.experiments import experiments

    groups: dict[str, list[tuple[RunSpec, RunRecord, Summary]]] = {}
    for record, measured in runs:
        if record.spec is not None:
            groups.setdefault(without_seed(record.spec).key, []).append((record.spec, record, measured))

    def order(mean: Mean) -> tuple[str, str, bool, float]:
        spec, score = mean.spec, mean.best.mean if mean.best else 0.0
        experiment = experiments().get(spec.experiment)
        metric = experiment.metrics.get(spec.variant) if experiment else None
        lower = metric is None or metric.better == "lower"
        return spec.experiment, spec.variant, mean.best is None, score if lower else -score

    return sorted(map(_mean, groups.values()), key=order)


def draw_means(means: Sequence[Mean]) -> None:
    """Print a table with one row per configuration if one has a finished run. Empty columns are left out."""
    from aida_lab.progress.labels import labels

    if not any(mean.best for mean in means):
        return
    names = {mean.spec.experiment for mean in means}
    named = {
        key: label
        for name in names
        for key, label in labels(mean.spec for mean in means if mean.spec.experiment == name).items()
    }
    columns = {
        "experiment": [mean.spec.experiment if len(names) > 1 else "" for mean in means],
        "method": [named[mean.spec.key].removesuffix(" seed 0") for mean in means],
        "metric": [mean.metric for mean in means],
        "best epoch: mean ± std": [mean_in_words(mean.best) for mean in means],
        "last epoch: mean ± std": [mean_in_words(mean.last) for mean in means],
        "n": [str(mean.best.n if mean.best else 0) for mean in means],
        "not in the mean": [mean.excluded for mean in means],
    }
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    drawn = table("mean over seeds", *columns, dense=True)
    for row in zip(*columns.values(), strict=True):
        drawn.add_row(*row)
    console().print(drawn)


def _mean(group: list[tuple[RunSpec, RunRecord, Summary]]) -> Mean:
    from aida_lab.report.statistics import mean_std

    # a seed counts once: a finished run comes before an unfinished one, then the run without a probe
    group.sort(key=lambda each: (each[1].state != "finished", each[0].probe_every))
    by_seed = {spec.seed: (record.state, measured) for spec, record, measured in reversed(group)}
    finished = [measured for state, measured in by_seed.values() if state == "finished"]
    best = [each.best for each in finished if each.best is not None]
    last = [each.last for each in finished if each.last is not None]
    return Mean(
        without_seed(group[0][0]),
        tuple(state for state, _ in by_seed.values()),
        next((measured.metric for _, measured in by_seed.values() if measured.metric), ""),
        mean_std(best) if best else None,
        mean_std(last) if last else None,
    )
