"""Learning-rate sweeps: one method at several learning rates, everything else the same.

One seed runs at every learning rate and chooses the best one. If that one is then repeated with fresh seeds, they
alone are the method's number: the run that chose it is the best of several, so it looks better than it is.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from aida_lab.report import words
from aida_lab.report.collect import Run
from aida_lab.report.groups import Configuration
from aida_lab.runs.checks import finite
from aida_lab.spec import Metric

#: The minimum number of learning rates in a sweep. A column shows its sweeps if it has two or more.
FEWEST = 3

#: The minimum number of learning rates and of fresh seeds in a tuning. The mean of a tuning excludes the tuning seed.
TUNED_FROM, FRESH_FROM = 6, 2


#: A place of a grid: a learning rate, or its number.
Place = TypeVar("Place", int, float)


@dataclass(frozen=True)
class Sweep:
    method: str
    name: str  #: the method, with the values that tell it from other sweeps of the method if there are any
    configurations: tuple[Configuration, ...]  #: one per learning rate, ascending
    seeds: frozenset[int]  #: the seeds that ran at every learning rate
    metric: Metric

    @cached_property
    def values(self) -> Mapping[float, float | None]:
        """The metric at the best epoch by learning rate, a mean if several seeds chose; None if one diverged."""
        return {lr_of(each): self._value(each) for each in self.configurations}

    @property
    def best(self) -> float | None:
        return choose(self.values, self.metric)

    @property
    def at_the_edge(self) -> bool:
        return self.best in (min(self.values), max(self.values))

    @property
    def chosen(self) -> Configuration | None:
        """The configuration with the best learning rate."""
        return next((each for each in self.configurations if lr_of(each) == self.best), None)

    @property
    def fresh(self) -> Configuration | None:
        """The same without the runs that chose it; None if no other seed has finished or diverged."""
        found = replace(self.chosen, tuning_seeds=self.seeds) if self.chosen else None
        return found if found and (found.counted or found.diverged) else None

    @property
    def tuned(self) -> bool:
        return len(self.values) >= TUNED_FROM and self.fresh is not None and len(self.fresh.counted) >= FRESH_FROM

    def _value(self, each: Configuration) -> float | None:
        found = [run.best if run.counts else None for run in each.runs if run.spec.seed in self.seeds]
        known = [value for value in found if value is not None]
        return math.fsum(known) / len(known) if len(known) == len(found) else None


def choose(values: Mapping[Place, float | None], metric: Metric) -> Place | None:
    """The best place of a grid; None if every run diverged. A diverged run has the value None.

    Of equal values, one inside the grid is preferred to one at its edge, then the smaller learning rate.
    """
    known = {place: value for place, value in values.items() if value is not None}
    if not known:
        return None
    edges = (min(values), max(values))
    return min(known, key=lambda place: (metric.sort_key(known[place]), place in edges, place))


def sweeps(found: Iterable[Configuration], metric: Metric) -> list[Sweep]:
    """The sweeps of one method, among its configurations under one setup."""
    families: dict[str, list[Configuration]] = {}
    for each in found:
        if (finite(each.hyper.get("lr")) or 0.0) > 0 and _ended(each):
            rest = {name: value for name, value in each.hyper.items() if name != "lr"}
            families.setdefault(json.dumps(rest, sort_keys=True), []).append(each)
    swept = []
    for family in families.values():
        shared = Counter(seed for each in family for seed in _ended(each))
        seed = min(shared, key=lambda seed: (-shared[seed], seed))
        members = sorted((each for each in family if seed in _ended(each)), key=lr_of)
        if len(members) >= FEWEST:
            seeds = frozenset.intersection(*map(_ended, members))
            swept.append(Sweep(members[0].method, members[0].method, tuple(members), seeds, metric))
    return _named(swept)


def lr_of(each: Configuration) -> float:
    return float(each.hyper["lr"])


def _ended(each: Configuration) -> frozenset[int]:
    return frozenset(run.spec.seed for run in each.runs if run.counts or run.state == "diverged")


def _named(found: Sequence[Sweep]) -> list[Sweep]:
    """The sweeps of one method, each named by the values that differ between them."""
    hypers = [{name: value for name, value in each.configurations[0].hyper.items() if name != "lr"} for each in found]
    names = dict.fromkeys(name for hyper in hypers for name in hyper)
    differ = [name for name in names if len({repr(hyper.get(name)) for hyper in hypers}) > 1]
    named = [
        replace(each, name=f"{each.method} {words.settings({name: hyper.get(name) for name in differ})}".strip())
        for each, hyper in zip(found, hypers, strict=True)
    ]
    return sorted(named, key=lambda each: words.by_value(each.name))


def without_tuning_runs(found: Sequence[Configuration], metric: Metric) -> list[Configuration]:
    """The configurations of one method; what was only run to tune a learning rate competes no more."""
    chosen: dict[str, Configuration] = {}
    passed: set[str] = set()
    for sweep in sweeps(found, metric):
        if sweep.tuned and sweep.fresh:
            chosen[sweep.fresh.id] = sweep.fresh
            passed |= {each.id for each in sweep.configurations} - {sweep.fresh.id}
    return [replace(chosen.get(each.id, each), outdone=each.id in passed) for each in found]


def expected_best(values: Sequence[float], metric: Metric) -> list[float]:
    """The expected best of k of these values, drawn at random without replacement, for k = 1 to all."""
    ascending = sorted(values, key=metric.sort_key, reverse=True)  # the worst first
    n = len(ascending)
    return [
        math.fsum(value * math.comb(place, k - 1) for place, value in enumerate(ascending)) / math.comb(n, k)
        for k in range(1, n + 1)
    ]


@dataclass(frozen=True)
class Reach:
    """How soon the runs of a configuration reach a value: medians, in which a run that does not is the latest.

    A median is None if it is not reached, or not known.
    """

    reached: int
    runs: int
    epochs: float | None
    steps: float | None
    seconds: float | None


def reach(configuration: Configuration, target: float, metric: Metric) -> Reach:
    places = [_first(run, target, metric) for run in configuration.counted] + [None] * configuration.diverged

    def median(amounts: Sequence[float | None]) -> float | None:
        """Of the runs' amounts; those of runs that did not reach it are infinite."""
        if any(amount is None for amount in amounts):
            return None
        found = statistics.median([amount for amount in amounts if amount is not None])
        return found if found < math.inf else None

    late = [math.inf] * places.count(None)
    found = [(run, place) for run, place in zip(configuration.counted, places, strict=False) if place is not None]
    return Reach(
        len(found),
        len(places),
        median([*(run.curve.epochs[place] for run, place in found), *late]),
        median([*(run.curve.steps[place] for run, place in found), *late]),
        median([*(_seconds(run, place) for run, place in found), *late]),
    )


def _first(run: Run, target: float, metric: Metric) -> int | None:
    """The place on the curve at which a run first is as good as the target."""
    values = enumerate(run.curve.metric)
    return next((place for place, value in values if value is not None and not metric.improves(target, value)), None)


def _seconds(run: Run, place: int) -> float | None:
    """Training seconds up to a place on the curve; None if other runs shared the device."""
    known = [value for value in run.curve.seconds[: place + 1] if value is not None]
    return None if run.shared or len(known) <= place else math.fsum(known)
