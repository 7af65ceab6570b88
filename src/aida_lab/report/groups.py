"""Which runs may be compared, and which may be averaged.

Runs under one :class:`Setup` may be compared in one column of a table. Runs of one :class:`Configuration` differ only
in the seed and are averaged. Measuring stepsizes changes no other number, so a run with a probe and one without are
the same run twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from aida_lab.report.collect import Run
from aida_lab.report.statistics import MeanStd, mean_std
from aida_lab.spec import Experiment, Metric, RunSpec

#: Which epoch gives a run's number.
Measure = Literal["best", "last"]


@dataclass(frozen=True, order=True)
class Setup:
    """Everything in a spec but the method and the seed: what must agree between the runs of a column."""

    experiment: str
    variant: str
    epochs: int
    batch: int
    limit: int  #: 0 for all batches
    precision: str
    compiled: bool
    deterministic: bool
    warmup: int = 0

    @classmethod
    def of(cls, spec: RunSpec) -> Setup:
        values = {each.name: getattr(spec, each.name) for each in fields(cls)}
        return cls(**{**values, "limit": spec.limit or 0})

    def departures(self, experiment: Experiment | None) -> tuple[str, ...]:
        """How it differs from the experiment as declared, in words; empty for runs that belong in a table."""
        found = []
        if experiment is not None and self.epochs != experiment.epochs:
            found.append(f"{self.epochs} of {experiment.epochs} epochs")
        if experiment is not None and self.batch != experiment.batch:
            found.append(f"batch {self.batch} instead of {experiment.batch}")
        if self.limit:
            found.append(f"at most {self.limit} batches per epoch")
        if self.warmup:
            found.append(f"a warm-up of {self.warmup} steps")
        return tuple(found)

    @property
    def manner(self) -> str:
        """How the runs were computed, in words."""
        words = [self.precision]
        words += ["compiled"] if self.compiled else []
        words += ["deterministic kernels"] if self.deterministic else []
        return ", ".join(words)


@dataclass(frozen=True)
class Configuration:
    """One method with one set of hyper-parameters under one setup: one run per seed."""

    spec: RunSpec  #: what its runs share: their spec with seed 0 and without a probe
    runs: tuple[Run, ...]  #: one per seed, ordered by seed; finished or not
    repeats: tuple[Run, ...] = ()  #: further runs of the same seeds
    #: Values that the paper neither fixed nor searched, if it has a figure for the method.
    untried: Mapping[str, Any] = field(default_factory=dict)
    #: Seeds that were used to choose its learning rate. They are excluded from the mean.
    tuning_seeds: frozenset[int] = frozenset()
    outdone: bool = False  #: whether another learning rate was chosen, and only that one was repeated with fresh seeds

    @cached_property
    def setup(self) -> Setup:
        return Setup.of(self.spec)

    @cached_property
    def method(self) -> str:
        return self.spec.method

    @property
    def hyper(self) -> Mapping[str, Any]:
        return self.spec.hyper

    @cached_property
    def id(self) -> str:
        """A short name, the same for the same configuration in every report."""
        text = json.dumps([astuple(self.setup), self.spec.optimizer, dict(self.hyper)], sort_keys=True)
        # a letter first: JavaScript sorts keys that look like numbers before all others
        return "c" + hashlib.sha256(text.encode()).hexdigest()[:10]

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.counts and run.spec.seed not in self.tuning_seeds)

    @property
    def diverged(self) -> int:
        return sum(run.state == "diverged" for run in self.runs)

    @property
    def open(self) -> int:
        """Runs without a number that did not diverge."""
        return sum(not run.counts for run in self.runs) - self.diverged

    @property
    def tried(self) -> bool:
        """Whether it has a finished or diverged run."""
        return bool(self.counted or self.diverged)

    def values(self, measure: Measure) -> list[float]:
        """One number per finished seed."""
        return [getattr(run, measure) for run in self.counted]

    def mean_std(self, measure: Measure) -> MeanStd | None:
        values = self.values(measure)
        return mean_std(values) if values else None

    def seconds(self) -> MeanStd | None:
        """Training seconds per epoch."""
        known = [run.seconds for run in self.counted if run.seconds is not None]
        return mean_std(known) if known else None


def configurations(runs: Iterable[Run]) -> list[Configuration]:
    """Runs grouped by their spec without seed and probe."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(replace(run.spec, seed=0, probe_every=0).key, []).append(run)
    return [_configuration(group) for group in groups.values()]


def ranked(found: Sequence[Configuration], metric: Metric) -> list[Configuration]:
    """The best first: most finished seeds, the paper's values, fewest diverged seeds, the better mean.

    Seeds come first, so that one lucky run does not displace a repeated configuration. The paper's values come next,
    because the paper's figure is the best of those alone. Diverged seeds count before the mean, which leaves them out.
    """

    def rank(each: Configuration) -> tuple[int, bool, int, float, str]:
        found, untried = each.mean_std("best"), bool(each.untried)
        if found is None:
            return 0, untried, 0, 0.0, each.id
        return -found.n, untried, each.diverged, metric.sort_key(found.mean), each.id

    return sorted(found, key=rank)


def _configuration(group: list[Run]) -> Configuration:
    by_seed: dict[int, Run] = {}
    repeats = []
    # a finished run first, and one without a probe before one with a probe
    for run in sorted(group, key=lambda each: (not each.counts, each.spec.probe_every, each.key)):
        if run.spec.seed in by_seed:
            repeats.append(run)
        else:
            by_seed[run.spec.seed] = run
    runs = tuple(by_seed[seed] for seed in sorted(by_seed))
    return Configuration(replace(group[0].spec, seed=0, probe_every=0), runs, tuple(repeats))
