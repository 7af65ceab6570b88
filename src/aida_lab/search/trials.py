"""Who measures what: claims on configurations that any number of workers make in one Optuna study.

A claim is a running trial. Trials are numbered in the order in which the database took them, so that of two
claims on one configuration the lower number is the first, whoever looks: the other withdraws. Neither a lock nor
a list of waiting trials is needed, and a worker may die between any two steps. Optuna's own grid sampler is no
such thing: workers that run at once may draw the same configuration.

States of a trial: running; complete or pruned: measured, and never measured again; failed: withdrawn, given back,
or its worker is dead, and its configuration is free.
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

from aida_lab.search.liveness import GRACE, Watch, is_gone, this_worker
from aida_lab.search.measured import Measured
from aida_lab.search.sampling import decoded, encoded, proposed
from aida_lab.search.space import Configuration, Space, as_text
from aida_lab.search.storage import Storage
from aida_lab.spec import Metric

#: What a trial's user attributes are called.
CONFIGURATION, RUN, CLAIM, WORKER, BEAT = "configuration", "run", "claim", "worker", "beat"
MEASURED, WITHDRAWN, ENDED = "measured", "withdrawn", "ended"


@dataclass(frozen=True)
class Claim:
    """A configuration that is ours to measure."""

    trial: int
    configuration: Configuration


class Register:
    """The studies of one storage that this worker takes part in."""

    def __init__(self, storage: Storage, grace: float = GRACE) -> None:
        self.storage = storage
        self._studies: list[int] = []
        self.watch = Watch(self._beat, self._look, grace)
        self.watch.start()

    def study(
        self, name: str, metric: Metric, distributions: Mapping[str, BaseDistribution], about: Mapping[str, Any]
    ) -> Trials:
        """The study of that name, made where it is not there."""
        direction = StudyDirection.MAXIMIZE if metric.better == "higher" else StudyDirection.MINIMIZE
        rdb = self.storage.rdb

        def opened() -> int:
            optuna.create_study(study_name=name, storage=rdb, direction=direction, load_if_exists=True)
            found: int = rdb.get_study_id_from_name(name)
            for key, value in about.items():
                rdb.set_study_user_attr(found, key, value)
            return found

        study = self.storage.ask(opened)
        self._studies.append(study)
        return Trials(self, study, name, distributions)

    def close(self) -> None:
        self.watch.close()

    def _beat(self, trial: int, number: int) -> None:
        with suppress(UpdateFinishedTrialError):  # taken from us: noticed when its run ends
            self.storage.try_once(lambda: self.storage.rdb.set_trial_user_attr(trial, BEAT, number))

    def _look(self) -> dict[int, object] | None:
        beats: dict[int, object] = {}
        for study in list(self._studies):
            running = self.storage.try_once(partial(self._running, study))
            if running is None:
                return None
            beats.update({trial._trial_id: trial.user_attrs.get(BEAT) for trial in running})
        return beats

    def _running(self, study: int) -> list[FrozenTrial]:
        found: list[FrozenTrial] = self.storage.rdb.get_all_trials(study, deepcopy=False, states=(TrialState.RUNNING,))
        return found


class Trials:
    """The trials of one study."""

    def __init__(
        self, register: Register, study: int, name: str, distributions: Mapping[str, BaseDistribution]
    ) -> None:
        self.name = name
        self._storage, self._watch = register.storage, register.watch
        self._study, self._distributions = study, dict(distributions)

    def read(self) -> Sequence[FrozenTrial]:
        """All of them, in the order of their numbers."""
        return self._storage.ask(self._all)

    def claim(self, configuration: Configuration, run: str) -> Claim | None:
        """Make a configuration ours; None where another was faster."""
        token = uuid.uuid4().hex
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params={name: encoded(value) for name, value in configuration.items()},
            distributions=self._distributions,
            user_attrs={**_signed(configuration, run), CLAIM: token},
        )

        def ours(trials: Sequence[FrozenTrial]) -> list[int]:
            return [trial._trial_id for trial in trials if trial.user_attrs.get(CLAIM) == token]

        tries = 0

        def made() -> Sequence[FrozenTrial]:
            nonlocal tries
            tries += 1
            # a try before this one may have been carried out, with only its answer lost
            if tries == 1 or not ours(self._all()):
                # held at once: while the storage is asked on, others listen already
                self._watch.hold(self._storage.rdb.create_new_trial(self._study, template_trial=template))
            return self._all()

        trials = self._storage.ask(made)
        claim = Claim(min(ours(trials)), configuration)
        self._watch.hold(claim.trial)
        if self._is_first(claim, trials):
            return claim
        self._withdraw(claim)
        return None

    def propose(self, space: Space, seed: int, wanted: int, run_of: Callable[[Configuration], str]) -> Claim | None:
        """Make a configuration ours that nobody has tried; None where as many as wanted are known by now.

        ``run_of`` gives the key of a configuration's run.
        """
        while len(known(trials := self.read())) < wanted:
            # seeds that differ from turn to turn, and are the same when a search is repeated
            turn = partial(proposed, self._storage.rdb, self.name, space, seed + len(trials))
            trial = self._storage.ask(turn)
            claim = Claim(trial._trial_id, decoded(trial.params, space))
            self._watch.hold(claim.trial)
            with suppress(UpdateFinishedTrialError):  # taken for dead by others in between
                for key, value in _signed(claim.configuration, run_of(claim.configuration)).items():
                    self._set(claim.trial, key, value)
            trials = self.read()
            if self._is_first(claim, trials) and as_text(claim.configuration) in known(trials)[:wanted]:
                return claim
            self._withdraw(claim)
        return None

    def complete(self, claim: Claim, measured: Measured, value: float) -> bool:
        """Keep what was measured; False where the claim was lost meanwhile, and others measure it."""
        return self._end(claim, TrialState.COMPLETE, [value], {MEASURED: measured.to_json()})

    def prune(self, claim: Claim, measured: Measured) -> bool:
        """Keep how far it came; it is not measured again."""
        return self._end(claim, TrialState.PRUNED, None, {MEASURED: measured.to_json()})

    def give_back(self, claim: Claim, reason: str) -> None:
        """Leave a configuration to whoever comes next."""
        self._end(claim, TrialState.FAIL, None, {ENDED: reason})

    def without_the_dead(self) -> Sequence[FrozenTrial]:
        """All trials, after the configurations whose workers are gone were freed."""
        trials, silent = self.read(), self._watch.silent()
        dead = [
            trial._trial_id
            for trial in trials
            if trial.state == TrialState.RUNNING
            and (trial._trial_id in silent or is_gone(trial.user_attrs.get(WORKER, {})))
        ]
        for trial in dead:
            self._end(Claim(trial, {}), TrialState.FAIL, None, {ENDED: "its worker was not heard of any more"})
        return self.read() if dead else trials

    def report(self, claim: Claim, epoch: int, value: float, pruner: optuna.pruners.BasePruner) -> bool:
        """Tell a trial's value after an epoch; returns whether it is to be given up. Trouble is no reason to."""

        def told() -> bool:
            rdb = self._storage.rdb
            rdb.set_trial_intermediate_value(claim.trial, epoch, value)
            return pruner.prune(optuna.load_study(study_name=self.name, storage=rdb), rdb.get_trial(claim.trial))

        with suppress(UpdateFinishedTrialError):
            return bool(self._storage.try_once(told))
        return False

    def _all(self) -> list[FrozenTrial]:
        return sorted(
            self._storage.rdb.get_all_trials(self._study, deepcopy=False), key=lambda trial: int(trial.number)
        )

    def _is_first(self, claim: Claim, trials: Sequence[FrozenTrial]) -> bool:
        first = live(trials).get(as_text(claim.configuration))
        return first is not None and first._trial_id == claim.trial

    def _withdraw(self, claim: Claim) -> None:
        self._end(claim, TrialState.FAIL, None, {WITHDRAWN: True})

    def _end(
        self, claim: Claim, state: TrialState, values: Sequence[float] | None, attributes: Mapping[str, Any]
    ) -> bool:
        rdb = self._storage.rdb
        try:
            for key, value in attributes.items():
                self._set(claim.trial, key, value)
            self._storage.ask(lambda: rdb.set_trial_state_values(claim.trial, state, values))
        except UpdateFinishedTrialError:
            # by us, with the answer lost, or by one who took us for dead
            return bool(self._storage.ask(lambda: rdb.get_trial(claim.trial)).state == state)
        finally:
            self._watch.let_go(claim.trial)
        return True

    def _set(self, trial: int, key: str, value: Any) -> None:
        self._storage.ask(lambda: self._storage.rdb.set_trial_user_attr(trial, key, value))


def live(trials: Sequence[FrozenTrial]) -> dict[str, FrozenTrial]:
    """By configuration the trial that measures it, or has measured it."""
    found: dict[str, FrozenTrial] = {}
    for trial in trials:
        if trial.state != TrialState.FAIL and WITHDRAWN not in trial.user_attrs and CONFIGURATION in trial.user_attrs:
            found.setdefault(as_text(trial.user_attrs[CONFIGURATION]), trial)
    return found


def known(trials: Sequence[FrozenTrial]) -> list[str]:
    """Configurations that were claimed at any time, the first first; also those that are free again."""
    return list(
        dict.fromkeys(
            as_text(trial.user_attrs[CONFIGURATION])
            for trial in trials
            if CONFIGURATION in trial.user_attrs and WITHDRAWN not in trial.user_attrs
        )
    )


def measured_in(trials: Sequence[FrozenTrial]) -> dict[str, Measured]:
    """By configuration what was measured."""
    return {
        text: Measured.from_json(trial.user_attrs[MEASURED])
        for text, trial in live(trials).items()
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
    }


def _signed(configuration: Configuration, run: str) -> dict[str, Any]:
    """What a claim says of itself; the configuration, which makes it one, last."""
    return {WORKER: dict(this_worker()), BEAT: 0, RUN: run, CONFIGURATION: dict(configuration)}
