"""Leases on configurations, which any number of workers take in one Optuna study.

A lease is a running trial. The database numbers trials in the order of their creation, so all workers agree that of
two leases on one configuration the lower number is valid; the other is withdrawn. This needs no lock and no queue, and
a worker may die at any point. With Optuna's own grid sampler, concurrent workers may draw the same configuration.

States of a trial: running; complete or pruned (measured, never measured again); failed (withdrawn, released or
orphaned by a dead worker, so that its configuration is free).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from aida_lab.search.liveness import TIMEOUT, Heartbeat, is_dead, this_worker
from aida_lab.search.measured import Measured
from aida_lab.search.sampling import decode, encode, propose
from aida_lab.search.space import Configuration, Space, as_text
from aida_lab.search.storage import Storage
from aida_lab.spec import Metric

#: Names of the user attributes of a trial.
CONFIGURATION, RUN, LEASE, WORKER, BEAT = "configuration", "run", "claim", "worker", "beat"
MEASURED, WITHDRAWN, ENDED = "measured", "withdrawn", "ended"


@dataclass(frozen=True)
class Lease:
    """The exclusive right of this worker to measure a configuration."""

    trial: int
    configuration: Configuration


class Register:
    """The studies of one storage that this worker takes part in, and its heartbeat."""

    def __init__(self, storage: Storage, timeout: float = TIMEOUT) -> None:
        self.storage = storage
        self._studies: list[int] = []
        self.heartbeat = Heartbeat(self._send_beat, self._read_beats, timeout)
        self.heartbeat.start()

    def study(
        self, name: str, metric: Metric, distributions: Mapping[str, BaseDistribution], about: Mapping[str, Any]
    ) -> Trials:
        """Open the study with this name, and create it if it does not exist."""
        direction = StudyDirection.MAXIMIZE if metric.better == "higher" else StudyDirection.MINIMIZE
        rdb = self.storage.rdb

        def open_study() -> int:
            optuna.create_study(study_name=name, storage=rdb, direction=direction, load_if_exists=True)
            study: int = rdb.get_study_id_from_name(name)
            for key, value in about.items():
                rdb.set_study_user_attr(study, key, value)
            return study

        study = self.storage.retry(open_study)
        self._studies.append(study)
        return Trials(self, study, name, distributions)

    def close(self) -> None:
        self.heartbeat.close()

    def _send_beat(self, trial: int, number: int) -> None:
        with suppress(UpdateFinishedTrialError):  # another worker took this one for dead
            self.storage.try_once(lambda: self.storage.rdb.set_trial_user_attr(trial, BEAT, number))

    def _read_beats(self) -> dict[int, object] | None:
        beats: dict[int, object] = {}
        read = partial(self.storage.rdb.get_all_trials, deepcopy=False, states=(TrialState.RUNNING,))
        for study in list(self._studies):
            running = self.storage.try_once(partial(read, study))
            if running is None:
                return None
            beats.update({trial._trial_id: trial.user_attrs.get(BEAT) for trial in running})
        return beats


class Trials:
    """The trials of one study."""

    def __init__(
        self, register: Register, study: int, name: str, distributions: Mapping[str, BaseDistribution]
    ) -> None:
        self.name = name
        self._storage, self._heartbeat = register.storage, register.heartbeat
        self._study, self._distributions = study, dict(distributions)

    def read(self) -> Sequence[FrozenTrial]:
        """All trials in the order of their numbers."""
        return self._storage.retry(self._all)

    def acquire(self, configuration: Configuration, run: str) -> Lease | None:
        """Lease a configuration; None if another worker was faster."""
        token = uuid.uuid4().hex
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params={name: encode(value) for name, value in configuration.items()},
            distributions=self._distributions,
            user_attrs={**_attributes(configuration, run), LEASE: token},
        )

        def ours(trials: Sequence[FrozenTrial]) -> list[int]:
            return [trial._trial_id for trial in trials if trial.user_attrs.get(LEASE) == token]

        tries = 0

        def create() -> Sequence[FrozenTrial]:
            nonlocal tries
            tries += 1
            # an earlier try may have succeeded with only its reply lost
            if tries == 1 or not ours(self._all()):
                # at once: other workers already expect heartbeats during later retries
                self._heartbeat.add(self._storage.rdb.create_new_trial(self._study, template_trial=template))
            return self._all()

        trials = self._storage.retry(create)
        lease = Lease(min(ours(trials)), configuration)
        self._heartbeat.add(lease.trial)
        if self._is_first(lease, trials):
            return lease
        self._withdraw(lease)
        return None

    def propose(self, space: Space, seed: int, wanted: int, run_of: Callable[[Configuration], str]) -> Lease | None:
        """Lease a new configuration; None if ``wanted`` configurations exist. ``run_of`` returns the key of its run."""
        while len(known(trials := self.read())) < wanted:
            # the seed differs per proposal and is the same when a search is repeated
            ask = partial(propose, self._storage.rdb, self.name, space, seed + len(trials))
            trial = self._storage.retry(ask)
            lease = Lease(trial._trial_id, decode(trial.params, space))
            self._heartbeat.add(lease.trial)
            with suppress(UpdateFinishedTrialError):  # another worker took this one for dead
                for key, value in _attributes(lease.configuration, run_of(lease.configuration)).items():
                    self._set(lease.trial, key, value)
            trials = self.read()
            if self._is_first(lease, trials) and as_text(lease.configuration) in known(trials)[:wanted]:
                return lease
            self._withdraw(lease)
        return None

    def complete(self, lease: Lease, measured: Measured, value: float) -> None:
        """Store a result. If the lease was lost, another worker measures the configuration instead."""
        self._end(lease, TrialState.COMPLETE, {MEASURED: measured.to_json()}, [value])

    def prune(self, lease: Lease, measured: Measured) -> None:
        """Store the result of a pruned run, which is not measured again."""
        self._end(lease, TrialState.PRUNED, {MEASURED: measured.to_json()})

    def release(self, lease: Lease, reason: str) -> None:
        """Free a configuration for other workers."""
        self._end(lease, TrialState.FAIL, {ENDED: reason})

    def reap_orphans(self) -> Sequence[FrozenTrial]:
        """Free the configurations of dead workers and return all trials."""
        trials, timed_out = self.read(), self._heartbeat.timed_out()
        orphans = [
            trial._trial_id
            for trial in trials
            if trial.state == TrialState.RUNNING
            and (trial._trial_id in timed_out or is_dead(trial.user_attrs.get(WORKER, {})))
        ]
        for trial in orphans:
            self._end(Lease(trial, {}), TrialState.FAIL, {ENDED: "its worker was not heard of any more"})
        return self.read() if orphans else trials

    def report(self, lease: Lease, epoch: int, value: float, pruner: optuna.pruners.BasePruner) -> bool:
        """Store the value of an epoch and return whether to prune the trial; False if the storage fails."""

        def decide() -> bool:
            rdb = self._storage.rdb
            rdb.set_trial_intermediate_value(lease.trial, epoch, value)
            return pruner.prune(optuna.load_study(study_name=self.name, storage=rdb), rdb.get_trial(lease.trial))

        with suppress(UpdateFinishedTrialError):
            return bool(self._storage.try_once(decide))
        return False

    def _all(self) -> list[FrozenTrial]:
        return sorted(
            self._storage.rdb.get_all_trials(self._study, deepcopy=False), key=lambda trial: int(trial.number)
        )

    def _is_first(self, lease: Lease, trials: Sequence[FrozenTrial]) -> bool:
        first = live(trials).get(as_text(lease.configuration))
        return first is not None and first._trial_id == lease.trial

    def _withdraw(self, lease: Lease) -> None:
        self._end(lease, TrialState.FAIL, {WITHDRAWN: True})

    def _end(
        self, lease: Lease, state: TrialState, attributes: Mapping[str, Any], values: Sequence[float] | None = None
    ) -> None:
        """End a trial, unless an earlier try or a worker that took this one for dead has ended it."""
        try:
            with suppress(UpdateFinishedTrialError):
                for key, value in attributes.items():
                    self._set(lease.trial, key, value)
                self._storage.retry(lambda: self._storage.rdb.set_trial_state_values(lease.trial, state, values))
        finally:
            self._heartbeat.remove(lease.trial)

    def _set(self, trial: int, key: str, value: Any) -> None:
        self._storage.retry(lambda: self._storage.rdb.set_trial_user_attr(trial, key, value))


def live(trials: Sequence[FrozenTrial]) -> dict[str, FrozenTrial]:
    """Map each configuration to the trial that measures or has measured it."""
    found: dict[str, FrozenTrial] = {}
    for trial in trials:
        if trial.state != TrialState.FAIL and WITHDRAWN not in trial.user_attrs and CONFIGURATION in trial.user_attrs:
            found.setdefault(as_text(trial.user_attrs[CONFIGURATION]), trial)
    return found


def known(trials: Sequence[FrozenTrial]) -> list[str]:
    """All configurations that were ever leased, oldest first, including those that are free again."""
    return list(
        dict.fromkeys(
            as_text(trial.user_attrs[CONFIGURATION])
            for trial in trials
            if CONFIGURATION in trial.user_attrs and WITHDRAWN not in trial.user_attrs
        )
    )


def measured_in(trials: Sequence[FrozenTrial]) -> dict[str, Measured]:
    """Map each measured configuration to its result."""
    return {
        text: Measured.from_json(trial.user_attrs[MEASURED])
        for text, trial in live(trials).items()
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
    }


def _attributes(configuration: Configuration, run: str) -> dict[str, Any]:
    """User attributes of a lease. The configuration comes last, because it makes the lease valid."""
    return {WORKER: dict(this_worker()), BEAT: 0, RUN: run, CONFIGURATION: dict(configuration)}
