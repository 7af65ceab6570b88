"""One tuning protocol for every method: a grid of learning rates with one seed, then fresh seeds at the best one.

Everything that is planned follows from the results of finished runs, so the same command makes the same plan again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import pairwise
from typing import Any

from aida_lab.events import Listener
from aida_lab.experiments import experiments
from aida_lab.external import import_optimizer, pair
from aida_lab.parsing import UsageError, parse_values
from aida_lab.progress.labels import differing, settings_in_words
from aida_lab.report.collect import Run, run_of
from aida_lab.report.statistics import MeanStd, mean_std
from aida_lab.report.sweeps import choose
from aida_lab.request import RunRequest
from aida_lab.runs.records import read_run
from aida_lab.spec import Metric, RunSpec
from aida_lab.stopping import Stop
from aida_lab.workers.attempt import Outcome
from aida_lab.workers.jobs import Jobs

#: Grid points on each side of a method's own learning rate, and the factor between two.
SIDE, FACTOR = 3, math.sqrt(10)

#: The fewest learning rates of a grid, and the largest factor between two: 1, 3, 10 is allowed.
FEWEST, WIDEST = 6, 10 / 3

#: A grid whose best point is at its edge is extended to at most so many times its size.
LONGEST = 2


@dataclass(frozen=True)
class Method:
    """One optimizer with its fixed values, and the learning rates to try."""

    #: Its run with the tuning seed, at any learning rate.
    base: RunSpec
    metric: Metric
    #: Ascending: the learning rates of ``--lrs``, or the method's own alone.
    given: tuple[float, ...]
    seeds: tuple[int, ...]
    #: Whether the learning rates halfway between the best one and its neighbours are tried, too.
    refine: bool = False

    @property
    def grid(self) -> range:
        """The places of the grid that every method gets. Place 0 is the first of the given learning rates."""
        return range(-SIDE, SIDE + 1) if len(self.given) == 1 else range(len(self.given))

    def lr(self, place: float) -> float:
        """The learning rate at a place of the grid, or beyond its edges at the distance of the last two.

        Halfway between two places it is their geometric mean.
        """
        if not isinstance(place, int):
            return float(f"{math.sqrt(self.lr(math.floor(place)) * self.lr(math.ceil(place))):.3g}")
        given, last = self.given, len(self.given) - 1
        if 0 <= place <= last:
            return given[place]
        edge, beyond = (given[0], place) if place < 0 else (given[-1], place - last)
        inner = given[min(1, last)] if place < 0 else given[max(0, last - 1)]
        factor = FACTOR if not last else max(edge / inner, inner / edge)
        return float(f"{edge * factor**beyond:.3g}")

    def spec(self, place: float, seed: int | None = None) -> RunSpec:
        """A run of the grid, or its repetition with a fresh seed."""
        hyper = {**self.base.hyper, "lr": self.lr(place)}
        return replace(self.base, hyper=hyper, seed=self.base.seed if seed is None else seed)

    def places(self, values: Mapping[float, float | None]) -> Sequence[float]:
        """The grid, given the results by place: one place longer if the best of it is at its edge; then finer.

        If every run diverged, a smaller learning rate is next. Nothing is added before all results are known.
        """
        found = self.grid
        while all(place in values for place in found):
            best = choose({place: values[place] for place in found}, self.metric)
            grows = len(found) < LONGEST * len(self.grid)
            if grows and (best is None or best == found[0]):
                found = range(found[0] - 1, found[-1] + 1)
            elif grows and best == found[-1]:
                found = range(found[0], found[-1] + 2)
            elif self.refine and best is not None:
                return sorted((*found, *(half for half in (best - 0.5, best + 0.5) if found[0] < half < found[-1])))
            else:
                break
        return found


def method_of(
    text: str, request: RunRequest, lrs: Sequence[float], seeds: tuple[int, ...], *, refine: bool = False
) -> Method:
    """The method that ``aida:eps=1e-16`` names: an optimizer as in ``aida train``, then values that it keeps."""
    parts = text.split(":")
    name = ":".join(part for part in parts if "=" not in part)
    fixed = parse_values(part for part in parts if "=" in part)
    request = replace(request, optimizers=(name,), given={**request.given, **fixed})
    spec = request.specs()[0]
    own: Any = spec.hyper.get("lr")
    if own is None and ":" in (first := pair(name)[0]):
        found = signature(import_optimizer(first)).parameters.get("lr")
        own = found.default if found else None
    if type(own) not in (int, float) or not own > 0:
        raise UsageError(f"{name} has no learning rate to start from; give one: --optimizer {name}:lr=1e-3")
    metric = request.experiment.metrics[spec.variant]
    return Method(spec, metric, tuple(lrs) or (float(own),), seeds, refine)


def parse_lrs(text: str) -> tuple[float, ...]:
    """Parse ``1e-4,3e-4,1e-3,..`` to ascending learning rates that are enough and close enough."""
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"--lrs {text!r} is not a list of numbers; write 1e-4,3e-4,1e-3,3e-3,1e-2,3e-2") from None
    if not all(0 < lr < math.inf for lr in found) or len(found) < FEWEST:
        raise UsageError(f"--lrs {text!r}: a grid has at least {FEWEST} different positive learning rates")
    if any(high / low > WIDEST * 1.001 for low, high in pairwise(found)):
        raise UsageError(f"--lrs {text!r}: two neighbours are more than a factor of 10/3 apart; add one between them")
    return found


@dataclass(frozen=True)
class Tuned:
    """The current results of one method."""

    method: Method
    #: Places of the grid so far, ascending.
    places: Sequence[float]
    #: The runs of the grid with a result, by place.
    grid: Mapping[float, Run]
    #: The place of the best run; None if the grid is not complete, or every run of it diverged.
    best: float | None
    #: The runs of fresh seeds with a result.
    fresh: Sequence[Run]

    @property
    def specs(self) -> list[RunSpec]:
        """Every run that is known to be needed so far: the grid first."""
        repeated = [] if self.best is None else [self.method.spec(self.best, seed) for seed in self.method.seeds]
        return [self.method.spec(place) for place in self.places] + repeated

    @property
    def name(self) -> str:
        """The method, with the values that are not the experiment's."""
        values = {name: value for name, value in differing(self.method.base).items() if name != "lr"}
        return f"{self.method.base.method} {settings_in_words(values)}".strip()

    @property
    def at_the_edge(self) -> bool:
        return self.best in (self.places[0], self.places[-1])

    @property
    def mean(self) -> MeanStd | None:
        """Over the fresh seeds that did not diverge."""
        found = [run.best for run in self.fresh if run.counts and run.best is not None]
        return mean_std(found) if found else None


@dataclass
class Protocol:
    """The tuning of all methods of one command."""

    methods: Sequence[Method]
    jobs: Jobs
    #: How each run ended that this process trained or found finished.
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _runs: dict[str, Run] = field(default_factory=dict)

    def specs(self) -> list[RunSpec]:
        """Every run that is known to be needed so far: the grids before the fresh seeds."""
        tuning = self.methods[0].base.seed
        return sorted((spec for each in self.results() for spec in each.specs), key=lambda spec: spec.seed != tuning)

    def results(self) -> list[Tuned]:
        return [self._of(method) for method in self.methods]

    def run(self, listen: Listener, expect: Callable[[Iterable[RunSpec]], Any], stop: Stop) -> None:
        """Train until nothing is left to run, or the rest failed, or a stop is requested."""
        while not stop.asked:
            given: set[str] = set()

            def following(given: set[str] = given) -> RunSpec | None:
                specs = self.specs()
                expect(specs)
                left = (spec for spec in specs if spec.key not in given and spec.key not in self.outcomes)
                if (spec := next(left, None)) is not None:
                    given.add(spec.key)
                return spec

            for outcome in self.jobs.work(iter(following, None), listen, stop):
                self._record(outcome)
            busy = [spec for spec in self.specs() if spec.key in given and spec.key not in self.outcomes]
            for outcome in self.jobs.work_all(busy, listen, stop):  # waits for the other processes that train them
                self._record(outcome)
            if not given:
                return

    def _record(self, outcome: Outcome) -> None:
        if outcome.done:
            run = run_of(read_run(self.jobs.out / outcome.key), experiments())
            if run.state in ("finished", "diverged"):
                self._runs[outcome.key] = run
            else:  # its folder was damaged since
                outcome = Outcome(outcome.key, "failed", run.remark)
        if outcome.state != "busy":
            self.outcomes[outcome.key] = outcome

    def _of(self, method: Method) -> Tuned:
        values: dict[float, float | None] = {}
        grid: dict[float, Run] = {}
        places: Sequence[float] = method.grid
        while len(grid) < len(places):
            for place in places:
                if (run := self._runs.get(method.spec(place).key)) is not None:
                    grid[place] = run
                    values[place] = run.best if run.counts else None
            if len(grid) < len(places):
                return Tuned(method, places, grid, None, [])
            places = method.places(values)
        found = Tuned(method, places, grid, choose(values, method.metric), [])
        fresh = [self._runs[spec.key] for spec in found.specs[len(places) :] if spec.key in self._runs]
        return replace(found, fresh=fresh)
