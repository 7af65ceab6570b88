"""Carry out searches: any number of workers measure every configuration once, then repeat the best one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from optuna.distributions import IntDistribution
from optuna.pruners import MedianPruner

from aida_lab.events import Event, Listener, Pruned
from aida_lab.experiments import experiments
from aida_lab.report.collect import Run, run_of
from aida_lab.runs.records import DONE, read_run
from aida_lab.search.findings import Findings, Measured, best_of
from aida_lab.search.liveness import this_worker
from aida_lab.search.plan import Plan
from aida_lab.search.storage import StorageError
from aida_lab.search.trials import Studies, Trials
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.workers.attempt import Outcome
from aida_lab.workers.jobs import Jobs

#: Trials that must end before the first is pruned; Optuna's default.
_PRUNER_STARTUP = 5
#: Seconds between two polls while other workers train the remaining runs.
_POLL = 1.0


class Search:
    """The search of one optimizer, from the first configuration to the last repetition."""

    def __init__(self, plan: Plan, studies: Studies) -> None:
        self.plan = plan
        self._studies = studies
        # no pruning in the first quarter: curves of different learning rates often cross there
        median = MedianPruner(n_startup_trials=_PRUNER_STARTUP, n_warmup_steps=plan.base.epochs // 4 + 1)
        self._pruner = None if plan.pruner == "none" else median
        grid = plan.sampler == "grid"
        distributions = plan.space.listed_values() if grid else plan.space.value_ranges()
        listed = plan.space.grid() if grid else None
        self._searched = Trials(studies, plan, plan.name, plan.about(), distributions, plan.spec, listed)
        self._repeated: Trials | None = None
        #: Whether this worker has nothing left to do: all runs are measured, or the remaining ones failed.
        self.over = False

    @property
    def stages(self) -> list[Trials]:
        """The configurations and, when the best one is known, its repetitions."""
        return [self._searched] + ([self._repeated] if self._repeated else [])

    def acquire(self, out: Path, avoided: set[str]) -> RunSpec | None:
        """Lease the next run for this worker; None if there is none at the moment."""
        if self.over:
            return None
        if self._repeated is None and (spec := self._searched.acquire(out, avoided)) is not None:
            return spec
        found = self.findings()
        if self._repeated is None:
            self.over = self._searched.over(found.rows)
            return None
        known = {row.measured.run: row.measured for row in found.rows if row.measured}
        while (spec := self._repeated.acquire(out, avoided)) is not None:
            if spec.key not in known:
                return spec
            self._repeated.finish(spec.key, known[spec.key])  # measured by a search run, perhaps on another machine
        self.over = self._repeated.over(self._repeated.rows())
        return None

    def should_prune(self, event: Event) -> bool:
        """Report the value of an epoch to the pruner and return its decision."""
        value = event.row.get(self.plan.metric.key)
        if self._pruner is None or event.run not in self._searched.leases or value is None or not math.isfinite(value):
            return False
        return self._searched.report(event.run, event.epoch, value, self._pruner)

    def findings(self) -> Findings:
        """The current results of all workers. Once the best configuration is known, its repetitions are a stage."""
        plan, rows = self.plan, self._searched.rows()
        best = best_of(rows, plan) if self._searched.done(rows) else None
        if best is not None and self._repeated is None:
            self._repeated = Trials(
                self._studies,
                plan,
                plan.repetitions_name(best.spec),
                {"of": plan.name},
                {"seed": IntDistribution(0, 2**62)},
                lambda params: plan.repetition(best.spec, params["seed"]),
                [{"seed": seed} for seed in plan.seeds],
            )
        return Findings(plan, rows, best, self._repeated.rows() if self._repeated else [])


@dataclass
class SearchLoop:
    """Carries out all searches of one command through one queue of runs."""

    searches: Sequence[Search]
    jobs: Jobs
    listen: Listener
    expect: Callable[[Iterable[RunSpec]], object]
    stop: Stop
    _reported: set[str] = field(default_factory=set)  #: keys of the runs that were leased here or reported as measured
    _waiting: bool = False

    def run(self) -> None:
        """Train until all runs are measured by any worker, the remaining ones failed, or a stop is requested."""
        for stage in self._stages():
            self.expect(stage.listed())
        try:
            while not self.stop.asked:
                queued: set[str] = set()  # the queue drops duplicates
                if (first := self._acquire(queued)) is not None:
                    runs = chain([first], iter(partial(self._acquire, queued), None))
                    for outcome in self.jobs.work(runs, self._forward, self.stop):
                        self._record(outcome)
                elif all(search.over for search in self.searches):
                    return
                else:
                    self._wait()
        finally:
            # other workers can continue at once; without a storage the leases time out
            with suppress(StorageError):
                for stage in self._stages():
                    for run in list(stage.leases):
                        stage.release(run, "stopped")

    def _stages(self) -> list[Trials]:
        return [stage for search in self.searches for stage in search.stages]

    def _acquire(self, queued: set[str]) -> RunSpec | None:
        """Lease a run of any search; None if there is none at the moment."""
        for search in self.searches:
            spec = search.acquire(self.jobs.out, queued)
            for stage in search.stages:
                self.expect(stage.listed())
                self._report_others(stage)
            if spec is not None:
                queued.add(spec.key)
                self.expect([spec])  # a proposed run is not listed in advance
                self._reported.add(spec.key)
                self._waiting = False
                return spec
        return None

    def _record(self, outcome: Outcome) -> None:
        run = outcome.key
        stage = next(each for each in self._stages() if run in each.leases)
        if outcome.done or outcome.state == "pruned":
            spec = stage.spec(stage.leases[run].params)
            trained = run_of(replace(read_run(self.jobs.out / run), spec=spec), experiments())
            if outcome.done and trained.state not in DONE:
                stage.fail(run, f"{trained.folder} no longer has a usable result: {trained.remark or trained.state}")
                return
            found = _measured(trained)
            stage.finish(run, found)
            if outcome.state == "pruned":
                self._report(found, spec, "pruned: worse than the median of other runs")
        elif outcome.state == "failed":
            stage.fail(run, outcome.error)
        else:  # interrupted, or locked by another process
            self._reported.discard(run)
            stage.release(run, outcome.error or outcome.state)

    def _forward(self, event: Event) -> None:
        self.listen(event)
        if event.kind != "epoch" or not any(search.should_prune(event) for search in self.searches):
            return
        if event.epoch < event.epochs:
            raise Pruned

    def _report_others(self, stage: Trials) -> None:
        for spec, each in stage.measured():
            if each.run not in self._reported:
                self._reported.add(each.run)
                self.expect([spec])
                where = "" if each.host == this_worker()["host"] else f" on {each.host}"
                self._report(each, spec, f"{each.state}{where}, measured earlier or by another worker")

    def _report(self, measured: Measured, spec: RunSpec, text: str) -> None:
        row = {"best": measured.best, "best_epoch": measured.best_epoch, "last": measured.last}
        self.listen(Event("skipped", spec.key, spec.epochs, spec.epochs, row=row, text=text))

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            self.listen(Event("note", "", text="other workers train the rest; waiting for them"))
        time.sleep(_POLL)


def _measured(run: Run) -> Measured:
    _, best, best_epoch, last = run.so_far
    state: Any = run.state if run.state in DONE else "pruned"
    return Measured(run.key, state, best, best_epoch, last, str(run.folder.resolve()), str(this_worker()["host"]))
