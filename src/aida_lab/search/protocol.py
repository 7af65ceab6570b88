"""Searches carried out: every configuration measured once by whichever worker, then repetitions at the best."""

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
from aida_lab.search.pruning import PRUNED, give_up
from aida_lab.search.sampling import SEEDS, as_listed, in_between, pruner_of
from aida_lab.search.stage import Row, Stage
from aida_lab.search.storage import StorageError
from aida_lab.search.trials import Register
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.workers.attempt import Outcome
from aida_lab.workers.jobs import Jobs

#: Seconds between two looks where others have the rest in hand.
_LOOK = 1.0


class Search:
    """One optimizer's search, from the first configuration to the last repetition."""

    def __init__(self, plan: Plan, register: Register) -> None:
        self.plan = plan
        self._register = register
        self._pruner = pruner_of(plan)
        self.configurations = self._search_stage()
        self.repetitions: Stage | None = None
        #: Whether nothing more is to be done here: all is measured, or what is left broke.
        self.over = False

    def listed(self) -> list[RunSpec]:
        """The runs that will come, as far as is known."""
        return [spec for stage in self._stages() for spec in stage.listed()]

    def measured(self) -> list[tuple[RunSpec, Measured]]:
        """What was found measured when last looked at."""
        return [each for stage in self._stages() for each in stage.measured()]

    def claim(self, out: Path, avoided: set[str]) -> RunSpec | None:
        """The next run for this worker; None where there is none for now."""
        if self.over:
            return None
        if self.repetitions is None and (spec := self.configurations.claim(out, avoided)) is not None:
            return spec
        rows = self.configurations.rows()
        if not self.configurations.done(rows):
            self.over = self.configurations.stuck(rows)
            return None
        best = best_of(rows, self.plan)
        if best is None:
            self.over = True
            return None
        if self.repetitions is None:
            self.repetitions = self._repetition_stage(best)
        return self._claim_repetition(self.repetitions, rows, out, avoided)

    def stage_of(self, run: str) -> Stage | None:
        """The stage that has a claim on a run."""
        return next((stage for stage in self._stages() if stage.held(run) is not None), None)

    def hear(self, event: Event) -> bool:
        """Take note of an epoch; returns whether the run is to be given up."""
        claim = self.configurations.held(event.run)
        value = event.row.get(self.plan.metric.key)
        if self._pruner is None or claim is None or value is None or not math.isfinite(value):
            return False
        return self.configurations.trials.report(claim, event.epoch, value, self._pruner)

    def findings(self) -> Findings:
        """How far it is, whoever did it."""
        rows = self.configurations.rows()
        best = best_of(rows, self.plan) if self.configurations.done(rows) else None
        if best is not None and self.repetitions is None:
            self.repetitions = self._repetition_stage(best)
        return Findings(self.plan, rows, best, self.repetitions.rows() if self.repetitions else [])

    def give_back_all(self, reason: str) -> None:
        for stage in self._stages():
            stage.give_back_all(reason)

    def _stages(self) -> list[Stage]:
        return [self.configurations] + ([self.repetitions] if self.repetitions else [])

    def _claim_repetition(self, stage: Stage, searched: Sequence[Row], out: Path, avoided: set[str]) -> RunSpec | None:
        known = {row.measured.run: row.measured for row in searched if row.measured}
        while (spec := stage.claim(out, avoided)) is not None:
            if spec.key not in known:
                return spec
            stage.complete(spec.key, known[spec.key])  # a run of the search, wherever its folder is
        rows = stage.rows()
        self.over = stage.done(rows) or stage.stuck(rows)
        return None

    def _search_stage(self) -> Stage:
        plan = self.plan
        grid = plan.sampler == "grid"
        trials = self._register.study(
            plan.name, plan.metric, (as_listed if grid else in_between)(plan.space), plan.about()
        )
        if grid:
            return Stage(trials, plan.spec, self._value, listed=plan.space.grid())
        return Stage(
            trials,
            plan.spec,
            self._value,
            propose=lambda each: each.propose(
                plan.space, plan.base.seed, plan.trials, lambda configuration: plan.spec(configuration).key
            ),
            wanted=plan.trials,
        )

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
    """All searches of one command, worked off through one queue of runs."""

    def __init__(
        self,
        searches: Sequence[Search],
        jobs: Jobs,
        listen: Listener,
        expect: Callable[[Iterable[RunSpec]], object],
        stop: Stop,
    ) -> None:
        self._searches, self._jobs, self._listen, self._expect, self._stop = searches, jobs, listen, expect, stop
        #: Keys of the runs that a display knows of, and of those whose end was ours or was told.
        self._expected: set[str] = set()
        self._told: set[str] = set()
        self._waits = False

    def carry_out(self) -> None:
        """Until all is measured, by us or by others, or what is left broke; or until stopped."""
        for search in self._searches:
            self._announce(search.listed())
        try:
            while not self._stop.asked:
                given: set[str] = set()  # the queue takes each run once
                if (first := self._claim(given)) is not None:
                    runs = chain([first], iter(partial(self._claim, given), None))
                    for outcome in self._jobs.work(runs, self._hear, self._stop):
                        self._settle(outcome)
                elif all(search.over for search in self._searches):
                    return
                else:
                    self._wait()
        finally:
            # at once for whoever comes next; where the storage is gone they are found dead later
            with suppress(StorageError):
                for search in self._searches:
                    search.give_back_all("stopped")

    def _claim(self, given: set[str]) -> RunSpec | None:
        """A run that is ours now; None where there is none for the moment."""
        for search in self._searches:
            spec = search.claim(self._jobs.out, given)
            self._announce(search.listed())
            self._tell_of_others(search)
            if spec is not None:
                given.add(spec.key)
                self._announce([spec])  # one that was proposed
                self._told.add(spec.key)
                self._waits = False
                return spec
        return None

    def _settle(self, outcome: Outcome) -> None:
        stage = next(filter(None, (search.stage_of(outcome.key) for search in self._searches)))
        folder = self._jobs.out / outcome.key
        if outcome.done:
            measured = measure(folder)
            if measured is None:
                stage.fail(outcome.key, f"{folder} has no result any more")
            else:
                stage.complete(outcome.key, measured)
        elif str(outcome.state) == PRUNED:
            spec, found = stage.spec_of(outcome.key), pruned(folder)
            stage.prune(outcome.key, found)
            self._tell(found, spec, "pruned: others were better by then")
        elif outcome.state == "failed":
            stage.fail(outcome.key, outcome.error)
        else:  # interrupted, or another process has its folder
            self._told.discard(outcome.key)
            stage.give_back(outcome.key, outcome.error or outcome.state)

    def _hear(self, event: Event) -> None:
        self._listen(event)
        if event.kind == "epoch" and any(search.hear(event) for search in self._searches):
            give_up(self._jobs.out, event.run)

    def _announce(self, specs: Iterable[RunSpec]) -> None:
        new = [spec for spec in specs if spec.key not in self._expected]
        self._expected.update(spec.key for spec in new)
        if new:
            self._expect(new)

    def _tell_of_others(self, search: Search) -> None:
        for spec, each in search.measured():
            if each.run not in self._told:
                self._told.add(each.run)
                self._announce([spec])
                where = "" if each.host == this_worker()["host"] else f" on {each.host}"
                self._tell(each, spec, f"{each.state}{where}, measured by another worker or before")

    def _tell(self, measured: Measured, spec: RunSpec, text: str) -> None:
        row = {"best": measured.best, "best_epoch": measured.best_epoch, "last": measured.last}
        self._listen(Event("skipped", spec.key, spec.epochs, spec.epochs, row=row, text=text))

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._listen(Event("note", "", text="other workers train the rest; waiting for them"))
        time.sleep(_LOOK)


def measure(folder: Path) -> Measured | None:
    """What the run in a folder has come to; None where it has no result."""
    record = read_run(folder)
    return None if record.result is None else _measured(record, record.result["state"])


def pruned(folder: Path) -> Measured:
    """How far the run in a folder came."""
    return _measured(read_run(folder), "pruned")


def _measured(record: RunRecord, state: MeasuredState) -> Measured:
    found = summary_of(record)
    folder, host = str(record.path.resolve()), str(this_worker()["host"])
    return Measured(record.path.name, state, found.best, found.best_epoch, found.last, folder, host)
