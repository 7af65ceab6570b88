"""The configurations of a search, which any number of workers lease and measure in one Optuna study.

A lease is a running trial. The database numbers trials in the order of their creation, so all workers agree that of
two leases on one configuration the lower number is valid; the other is withdrawn. This needs no lock and no queue, and
a worker may die at any point. With Optuna's own grid sampler, concurrent workers may draw the same configuration.

States of a trial: running; complete or pruned (measured, never measured again); failed (withdrawn, released or
orphaned by a dead worker, so that its configuration is free).
"""

from __future__ import annotations

import json
import operator
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from aida_lab.runs.lock import is_held
from aida_lab.runs.records import LOCK
from aida_lab.search.findings import Measured, Row
from aida_lab.search.liveness import TIMEOUT, Heartbeat, is_dead, this_worker
from aida_lab.search.plan import Plan
from aida_lab.search.space import Params, as_text, encode
from aida_lab.search.storage import Storage
from aida_lab.spec import Metric, RunSpec

#: Names of the user attributes of a trial.
CONFIGURATION, RUN, LEASE, WORKER, BEAT = "configuration", "run", "claim", "worker", "beat"
MEASURED, WITHDRAWN, ENDED = "measured", "withdrawn", "ended"


class Studies:
    """The studies of one storage that this worker takes part in, and its heartbeat."""

    def __init__(self, storage: Storage, timeout: float = TIMEOUT) -> None:
        self.storage = storage
        self._open: list[int] = []
        self.heartbeat = Heartbeat(self._send_beat, self._read_beats, timeout)
        self.heartbeat.start()

    def open(self, name: str, metric: Metric, about: Mapping[str, Any]) -> int:
        """Open the study with this name, create it if it does not exist, and return its number."""
        direction = StudyDirection.MAXIMIZE if metric.better == "higher" else StudyDirection.MINIMIZE
        rdb = self.storage.rdb

        def open_study() -> int:
            optuna.create_study(study_name=name, storage=rdb, direction=direction, load_if_exists=True)
            study: int = rdb.get_study_id_from_name(name)
            for key, value in about.items():
                rdb.set_study_user_attr(study, key, value)
            return study

        self._open.append(self.storage.retry(open_study))
        return self._open[-1]

    def close(self) -> None:
        self.heartbeat.close()

    def _send_beat(self, trial: int, number: int) -> None:
        with suppress(UpdateFinishedTrialError):  # another worker took this one for dead
            self.storage.try_once(self.storage.rdb.set_trial_user_attr, trial, BEAT, number)

    def _read_beats(self) -> dict[int, object] | None:
        beats: dict[int, object] = {}
        read, states = self.storage.rdb.get_all_trials, (TrialState.RUNNING,)
        for study in list(self._open):
            running = self.storage.try_once(read, study, deepcopy=False, states=states)
            if running is None:
                return None
            beats.update({trial._trial_id: trial.user_attrs.get(BEAT) for trial in running})
        return beats


class Lease(NamedTuple):
    """The exclusive right of this worker to measure a configuration."""

    trial: int
    params: Params


class Trials:
    """The trials of one study: which configurations are free, leased or measured.

    The configurations are the ``listed`` ones, or those that TPE proposes until there are enough.
    """

    def __init__(
        self,
        studies: Studies,
        plan: Plan,
        name: str,
        about: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        make_spec: Callable[[Params], RunSpec],
        listed: Sequence[Params] | None = None,
    ) -> None:
        self._storage, self._heartbeat = studies.storage, studies.heartbeat
        self._study = studies.open(name, plan.metric, about)
        self._plan, self._name, self._distributions, self._make_spec = plan, name, dict(distributions), make_spec
        self._listed = listed
        self._wanted = plan.trials if listed is None else len(listed)
        self._specs: dict[str, RunSpec] = {}
        self._seen: dict[str, Measured] = {}
        self.leases: dict[str, Lease] = {}  #: leases of this worker by run key
        self._failed: dict[str, str] = {}  #: Errors by configuration. This worker does not retry them.

    def spec(self, params: Params) -> RunSpec:
        text = as_text(params)
        if text not in self._specs:
            self._specs[text] = self._make_spec(params)
        return self._specs[text]

    def listed(self) -> list[RunSpec]:
        """The runs that are known in advance."""
        return [self.spec(params) for params in self._listed or ()]

    def measured(self) -> list[tuple[RunSpec, Measured]]:
        """Results that were known at the last call of :meth:`acquire`."""
        return [(self.spec(json.loads(text)), measured) for text, measured in self._seen.items()]

    def acquire(self, out: Path, avoided: set[str]) -> RunSpec | None:
        """Lease the next run for this worker; None if there is none at the moment."""
        choose: Callable[[list[Params]], Params] = operator.itemgetter(0)
        lease = None
        while lease is None and (free := self._free(out, avoided)):
            lease = self._lease(choose(free))
            choose = random.choice  # workers that start together would compete for the next one again
        if lease is None and (self._listed is not None or (lease := self._propose()) is None):
            return None
        spec = self.spec(lease.params)
        self.leases[spec.key] = lease
        return spec

    def finish(self, run: str, measured: Measured) -> None:
        """Store a result, which is final. If the lease was lost, another worker measures the configuration instead."""
        pruned = measured.state == "pruned"
        values = None if pruned else [measured.value(self._plan.by, self._plan.metric)]
        state = TrialState.PRUNED if pruned else TrialState.COMPLETE
        self._end(self.leases.pop(run).trial, state, {MEASURED: asdict(measured)}, values)

    def release(self, run: str, reason: str) -> None:
        """Free a configuration for other workers."""
        self._end(self.leases.pop(run).trial, TrialState.FAIL, {ENDED: reason})

    def fail(self, run: str, error: str) -> None:
        """Record a failed run. Other workers may retry it; this one does not."""
        self._failed[as_text(self.leases[run].params)] = error
        self.release(run, error)

    def report(self, run: str, epoch: int, value: float, pruner: optuna.pruners.BasePruner) -> bool:
        """Store the value of an epoch and return whether to prune the run; False if the storage fails."""
        rdb, trial = self._storage.rdb, self.leases[run].trial

        def decide() -> bool:
            rdb.set_trial_intermediate_value(trial, epoch, value)
            return pruner.prune(optuna.load_study(study_name=self._name, storage=rdb), rdb.get_trial(trial))

        with suppress(UpdateFinishedTrialError):
            return bool(self._storage.try_once(decide))
        return False

    def rows(self) -> list[Row]:
        """All configurations in the order of the list or of the proposals."""
        trials = self._read()
        taken, measured = live(trials), measured_in(trials)
        found = []
        for params in self._configurations(trials):
            text, state, problem = as_text(params), "open", ""
            if text in measured:
                state = measured[text].state
            elif text in taken:
                worker = taken[text].user_attrs[WORKER]
                here = worker.get("host") == this_worker()["host"]
                state = "running"
                problem = f"process {worker.get('process')} {'here' if here else 'on ' + str(worker.get('host'))}"
            elif text in self._failed:
                state, problem = "failed", self._failed[text]
            found.append(Row(params, self.spec(params), measured.get(text), state, problem))
        return found

    def done(self, rows: Sequence[Row]) -> bool:
        return len(rows) >= self._wanted and all(row.measured for row in rows)

    def over(self, rows: Sequence[Row]) -> bool:
        """Whether this worker has nothing left to do: all runs are measured, or the remaining ones failed here."""
        return len(rows) >= self._wanted and all(row.measured or row.state == "failed" for row in rows)

    def _read(self) -> Sequence[FrozenTrial]:
        return self._storage.retry(self._all)

    def _all(self) -> list[FrozenTrial]:
        """All trials in the order of their numbers."""
        trials = self._storage.rdb.get_all_trials(self._study, deepcopy=False)
        return sorted(trials, key=lambda trial: int(trial.number))

    def _configurations(self, trials: Sequence[FrozenTrial]) -> list[Params]:
        if self._listed is not None:
            return list(self._listed)
        return [json.loads(text) for text in known(trials)[: self._wanted]]

    def _free(self, out: Path, avoided: set[str]) -> list[Params]:
        """Configurations without a lease that this worker may measure."""
        trials = self._reap_orphans()
        self._seen, taken = measured_in(trials), {*live(trials), *self._failed}
        found = [each for each in self._configurations(trials) if as_text(each) not in taken]
        return [each for each in found if (key := self.spec(each).key) not in avoided and not is_held(out / key / LOCK)]

    def _reap_orphans(self) -> Sequence[FrozenTrial]:
        """Free the configurations of dead workers and return all trials."""
        trials, timed_out = self._read(), self._heartbeat.timed_out()
        orphans = [
            trial._trial_id
            for trial in trials
            if trial.state == TrialState.RUNNING
            and (trial._trial_id in timed_out or is_dead(trial.user_attrs.get(WORKER, {})))
        ]
        for trial in orphans:
            self._end(trial, TrialState.FAIL, {ENDED: "its worker was not heard of any more"})
        return self._read() if orphans else trials

    def _lease(self, params: Params) -> Lease | None:
        """Lease a configuration; None if another worker was faster."""
        token = uuid.uuid4().hex
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params={name: encode(value) for name, value in params.items()},
            distributions=self._distributions,
            user_attrs={**self._attributes(params), LEASE: token},
        )

        def ours(trials: Sequence[FrozenTrial]) -> list[int]:
            return [trial._trial_id for trial in trials if trial.user_attrs.get(LEASE) == token]

        def create() -> Sequence[FrozenTrial]:
            if not ours(self._all()):  # otherwise an earlier try succeeded with only its reply lost
                # at once: other workers already expect heartbeats during later retries
                self._heartbeat.add(self._storage.rdb.create_new_trial(self._study, template_trial=template))
            return self._all()

        trials = self._storage.retry(create)
        lease = Lease(min(ours(trials)), params)
        self._heartbeat.add(lease.trial)
        return self._valid(lease, trials)

    def _propose(self) -> Lease | None:
        """Lease a new configuration; None if there are enough."""
        while len(known(trials := self._read())) < self._wanted:
            # the seed differs per proposal and is the same when a search is repeated
            seed = self._plan.base.seed + len(trials)
            lease = Lease(*self._storage.retry(self._plan.space.propose, self._storage.rdb, self._name, seed))
            self._heartbeat.add(lease.trial)
            with suppress(UpdateFinishedTrialError):  # another worker took this one for dead
                self._set(lease.trial, self._attributes(lease.params))
            if (valid := self._valid(lease, self._read())) is not None:
                return valid
        return None

    def _attributes(self, params: Params) -> dict[str, Any]:
        """User attributes of a lease. The configuration comes last, because it makes the lease valid."""
        run = self.spec(params).key
        return {WORKER: dict(this_worker()), BEAT: 0, RUN: run, CONFIGURATION: dict(params)}

    def _valid(self, lease: Lease, trials: Sequence[FrozenTrial]) -> Lease | None:
        """The lease, or None after it was withdrawn: another one is older, or there are enough configurations."""
        text = as_text(lease.params)
        first = live(trials).get(text)
        wanted = map(as_text, self._configurations(trials))
        if first is not None and first._trial_id == lease.trial and text in wanted:
            return lease
        self._end(lease.trial, TrialState.FAIL, {WITHDRAWN: True})
        return None

    def _end(
        self, trial: int, state: TrialState, attributes: Mapping[str, Any], values: Sequence[float] | None = None
    ) -> None:
        """End a trial, unless an earlier try or a worker that took this one for dead has ended it."""
        try:
            with suppress(UpdateFinishedTrialError):
                self._set(trial, attributes)
                self._storage.retry(self._storage.rdb.set_trial_state_values, trial, state, values)
        finally:
            self._heartbeat.remove(trial)

    def _set(self, trial: int, attributes: Mapping[str, Any]) -> None:
        for key, value in attributes.items():
            self._storage.retry(self._storage.rdb.set_trial_user_attr, trial, key, value)


def live(trials: Sequence[FrozenTrial]) -> dict[str, FrozenTrial]:
    """Map each configuration to the trial that measures or has measured it."""
    found: dict[str, FrozenTrial] = {}
    for trial in trials:
        if trial.state != TrialState.FAIL and _is_lease(trial):
            found.setdefault(as_text(trial.user_attrs[CONFIGURATION]), trial)
    return found


def known(trials: Sequence[FrozenTrial]) -> list[str]:
    """All configurations that were ever leased, oldest first, including those that are free again."""
    return list(dict.fromkeys(as_text(trial.user_attrs[CONFIGURATION]) for trial in trials if _is_lease(trial)))


def measured_in(trials: Sequence[FrozenTrial]) -> dict[str, Measured]:
    """Map each measured configuration to its result."""
    ended = {text: trial for text, trial in live(trials).items() if trial.state.is_finished()}
    return {text: Measured(**trial.user_attrs[MEASURED]) for text, trial in ended.items()}


def _is_lease(trial: FrozenTrial) -> bool:
    return CONFIGURATION in trial.user_attrs and WITHDRAWN not in trial.user_attrs
