"""Carry out searches: any number of workers measure every configuration once, then repeat the best one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from aida_lab.events import Event, Listener
from aida_lab.runs.store import RunRecord, read_run
from aida_lab.runs.summary import summary_of
from aida_lab.search.findings import Findings, best_of
from aida_lab.search.liveness import this_worker
from aida_lab.search.measured import Measured, MeasuredState
from aida_lab.search.plan import Plan
from aida_lab.search.pruning import prune
from aida_lab.search.sampling import SEEDS, listed_values, pruner_of, value_ranges
from aida_lab.search.stage import Row, Stage
from aida_lab.search.storage import StorageError
from aida_lab.search.trials import Lease, Register
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.workers.attempt import Outcome
from aida_lab.workers.jobs import Jobs

#: Seconds between two polls while other workers train the remaining runs.
_POLL = 1.0


class Search:
    """The search of one optimizer, from the first configuration to the last repetition."""

    def __init__(self, plan: Plan, register: Register) -> None:
        self.plan = plan
        self._register = register
        self._pruner = pruner_of(plan)
        self.configurations = self._search_stage()
        self.repetitions: Stage | None = None
        #: Whether this worker has nothing left to do: all runs are measured, or the remaining ones failed.
        self.over = False

    def listed(self) -> list[RunSpec]:
        """The runs that are known in advance."""
        return [spec for stage in self._stages() for spec in stage.listed()]

    def measured(self) -> list[tuple[RunSpec, Measured]]:
        """Results that were known at the last call of :meth:`acquire`."""
        return [each for stage in self._stages() for each in stage.measured()]

    def acquire(self, out: Path, avoided: set[str]) -> RunSpec | None:
        """Lease the next run for this worker; None if there is none at the moment."""
        if self.over:
            return None
        if self.repetitions is None and (spec := self.configurations.acquire(out, avoided)) is not None:
            return spec
        rows = self.configurations.rows()
        if not self.configurations.done(rows):
            self.over = self.configurations.stuck(rows)
            return None
        if (best := best_of(rows, self.plan)) is None:
            self.over = True
            return None
        if self.repetitions is None:
            self.repetitions = self._repetition_stage(best)
        return self._acquire_repetition(self.repetitions, rows, out, avoided)

    def stage_of(self, run: str) -> Stage | None:
        """The stage that has leased a run; None if there is none."""
        return next((stage for stage in self._stages() if stage.lease(run) is not None), None)

    def should_prune(self, event: Event) -> bool:
        """Report the value of an epoch to the pruner and return its decision."""
        lease = self.configurations.lease(event.run)
        value = event.row.get(self.plan.metric.key)
        if self._pruner is None or lease is None or value is None or not math.isfinite(value):
            return False
        return self.configurations.trials.report(lease, event.epoch, value, self._pruner)

    def findings(self) -> Findings:
        """The current results of all workers."""
        rows = self.configurations.rows()
        best = best_of(rows, self.plan) if self.configurations.done(rows) else None
        if best is not None and self.repetitions is None:
            self.repetitions = self._repetition_stage(best)
        return Findings(self.plan, rows, best, self.repetitions.rows() if self.repetitions else [])

    def release_all(self, reason: str) -> None:
        for stage in self._stages():
            stage.release_all(reason)

    def _stages(self) -> list[Stage]:
        return [self.configurations] + ([self.repetitions] if self.repetitions else [])

    def _acquire_repetition(
        self, stage: Stage, searched: Sequence[Row], out: Path, avoided: set[str]
    ) -> RunSpec | None:
        known = {row.measured.run: row.measured for row in searched if row.measured}
        while (spec := stage.acquire(out, avoided)) is not None:
            if spec.key not in known:
                return spec
            stage.complete(spec.key, known[spec.key])  # a search run has measured it, perhaps on another machine
        rows = stage.rows()
        self.over = stage.done(rows) or stage.stuck(rows)
        return None

    def _search_stage(self) -> Stage:
        plan = self.plan
        grid = plan.sampler == "grid"
        trials = self._register.study(
            plan.name, plan.metric, (listed_values if grid else value_ranges)(plan.space), plan.about()
        )
        if grid:
            return Stage(trials, plan.spec, self._value, listed=plan.space.grid())

        def propose() -> Lease | None:
            return trials.propose(plan.space, plan.base.seed, plan.trials, lambda values: plan.spec(values).key)

        return Stage(trials, plan.spec, self._value, propose=propose, wanted=plan.trials)

    def _repetition_stage(self, best: Row) -> Stage:
        plan = self.plan
        trials = self._register.study(plan.repetitions_name(best.spec), plan.metric, SEEDS, {"of": plan.name})
        return Stage(
            trials,
            lambda configuration: plan.repetition(best.spec, configuration["seed"]),
            self._value,
            listed=[{"seed": seed} for seed in plan.seeds],
        )

    def _value(self, measured: Measured) -> float:
        return measured.value(self.plan.by, self.plan.metric)


class Protocol:
    """Carries out all searches of one command through one queue of runs."""

    def __init__(
        self,
        searches: Sequence[Search],
        jobs: Jobs,
        listen: Listener,
        expect: Callable[[Iterable[RunSpec]], object],
        stop: Stop,
    ) -> None:
        self._searches, self._jobs, self._listen, self._expect, self._stop = searches, jobs, listen, expect, stop
        #: Keys of the runs that the display knows, and of those that were leased here or reported as measured.
        self._expected: set[str] = set()
        self._reported: set[str] = set()
        self._waiting = False

    def carry_out(self) -> None:
        """Train until all runs are measured by any worker, the remaining ones failed, or a stop is requested."""
        for search in self._searches:
            self._announce(search.listed())
        try:
            while not self._stop.asked:
                queued: set[str] = set()  # the queue drops duplicates
                if (first := self._acquire(queued)) is not None:
                    runs = chain([first], iter(partial(self._acquire, queued), None))
                    for outcome in self._jobs.work(runs, self._forward, self._stop):
                        self._record(outcome)
                elif all(search.over for search in self._searches):
                    return
                else:
                    self._wait()
        finally:
            # other workers can continue at once; without a storage the leases time out
            with suppress(StorageError):
                for search in self._searches:
                    search.release_all("stopped")

    def _acquire(self, queued: set[str]) -> RunSpec | None:
        """Lease a run of any search; None if there is none at the moment."""
        for search in self._searches:
            spec = search.acquire(self._jobs.out, queued)
            self._announce(search.listed())
            self._report_others(search)
            if spec is not None:
                queued.add(spec.key)
                self._announce([spec])  # a proposed run is not listed in advance
                self._reported.add(spec.key)
                self._waiting = False
                return spec
        return None

    def _record(self, outcome: Outcome) -> None:
        stage = next(filter(None, (search.stage_of(outcome.key) for search in self._searches)))
        folder = self._jobs.out / outcome.key
        if outcome.done:
            record = read_run(folder)
            if record.result is None:
                stage.fail(outcome.key, f"{folder} no longer has a result")
            else:
                stage.complete(outcome.key, _measured(record, record.result["state"]))
        elif outcome.state == "pruned":
            spec, found = stage.spec_of(outcome.key), _measured(read_run(folder), "pruned")
            stage.prune(outcome.key, found)
            self._report(found, spec, "pruned: worse than the median of other runs")
        elif outcome.state == "failed":
            stage.fail(outcome.key, outcome.error)
        else:  # interrupted, or locked by another process
            self._reported.discard(outcome.key)
            stage.release(outcome.key, outcome.error or outcome.state)

    def _forward(self, event: Event) -> None:
        self._listen(event)
        if event.kind == "epoch" and any(search.should_prune(event) for search in self._searches):
            prune(self._jobs.out, event.run)

    def _announce(self, specs: Iterable[RunSpec]) -> None:
        new = [spec for spec in specs if spec.key not in self._expected]
        self._expected.update(spec.key for spec in new)
        if new:
            self._expect(new)

    def _report_others(self, search: Search) -> None:
        for spec, each in search.measured():
            if each.run not in self._reported:
                self._reported.add(each.run)
                self._announce([spec])
                where = "" if each.host == this_worker()["host"] else f" on {each.host}"
                self._report(each, spec, f"{each.state}{where}, measured earlier or by another worker")

    def _report(self, measured: Measured, spec: RunSpec, text: str) -> None:
        row = {"best": measured.best, "best_epoch": measured.best_epoch, "last": measured.last}
        self._listen(Event("skipped", spec.key, spec.epochs, spec.epochs, row=row, text=text))

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._listen(Event("note", "", text="other workers train the rest; waiting for them"))
        time.sleep(_POLL)


def _measured(record: RunRecord, state: MeasuredState) -> Measured:
    found = summary_of(record)
    folder, host = str(record.path.resolve()), str(this_worker()["host"])
    return Measured(record.path.name, state, found.best, found.best_epoch, found.last, folder, host)
