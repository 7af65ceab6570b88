"""One stage of a search, either its configurations or its repetitions: what is open, leased or measured."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aida_lab.runs.lock import is_held
from aida_lab.runs.records import LOCK
from aida_lab.search.liveness import this_worker
from aida_lab.search.measured import Measured
from aida_lab.search.space import Configuration, as_text
from aida_lab.search.trials import WORKER, Lease, Trials, known, live, measured_in
from aida_lab.spec import RunSpec


@dataclass(frozen=True)
class Row:
    """The current state of one configuration."""

    configuration: Configuration
    spec: RunSpec
    #: None if it is not measured yet.
    measured: Measured | None
    #: One word, and the reason if it is not measured.
    state: str
    problem: str = ""


class Stage:
    """The configurations of one study: the ``listed`` ones, or those that ``propose`` leases until there are enough."""

    def __init__(
        self,
        trials: Trials,
        spec_of: Callable[[Configuration], RunSpec],
        value_of: Callable[[Measured], float],
        listed: Sequence[Configuration] | None = None,
        propose: Callable[[], Lease | None] | None = None,
        wanted: int | None = None,
    ) -> None:
        self.trials = trials
        self.wanted = len(listed or ()) if wanted is None else wanted
        self._listed, self._propose, self._value_of, self._make_spec = listed, propose, value_of, spec_of
        self._specs: dict[str, RunSpec] = {}
        self._seen: dict[str, Measured] = {}
        #: Leases of this worker by run key.
        self._leases: dict[str, Lease] = {}
        #: Errors by configuration. This process does not retry them.
        self._failed: dict[str, str] = {}

    def acquire(self, out: Path, avoided: set[str]) -> RunSpec | None:
        """Lease the next run for this worker; None if there is none at the moment."""
        choose: Callable[[list[Configuration]], Configuration] = operator.itemgetter(0)
        lease = None
        while lease is None and (free := self._free(out, avoided)):
            configuration = choose(free)
            lease = self.trials.acquire(configuration, self.spec(configuration).key)
            choose = random.choice  # workers that start together would compete for the next one again
        if lease is None and (self._propose is None or (lease := self._propose()) is None):
            return None
        spec = self.spec(lease.configuration)
        self._leases[spec.key] = lease
        return spec

    def _free(self, out: Path, avoided: set[str]) -> list[Configuration]:
        """Configurations without a lease that this worker may measure."""
        trials = self.trials.reap_orphans()
        self._seen, taken = measured_in(trials), {*live(trials), *self._failed}
        found = [each for each in self._configurations(trials) if as_text(each) not in taken]
        return [each for each in found if (key := self.spec(each).key) not in avoided and not is_held(out / key / LOCK)]

    def spec(self, configuration: Configuration) -> RunSpec:
        text = as_text(configuration)
        if text not in self._specs:
            self._specs[text] = self._make_spec(configuration)
        return self._specs[text]

    def listed(self) -> list[RunSpec]:
        """The runs that are known in advance."""
        return [self.spec(configuration) for configuration in self._listed or ()]

    def measured(self) -> list[tuple[RunSpec, Measured]]:
        """Results that were known at the last call of :meth:`acquire`."""
        return [(self.spec(json.loads(text)), measured) for text, measured in self._seen.items()]

    def lease(self, run: str) -> Lease | None:
        """The lease of this worker on a run."""
        return self._leases.get(run)

    def spec_of(self, run: str) -> RunSpec:
        """The spec of a run that this worker has leased."""
        return self.spec(self._leases[run].configuration)

    def complete(self, run: str, measured: Measured) -> None:
        self.trials.complete(self._leases.pop(run), measured, self._value_of(measured))

    def prune(self, run: str, measured: Measured) -> None:
        self.trials.prune(self._leases.pop(run), measured)

    def release(self, run: str, reason: str) -> None:
        self.trials.release(self._leases.pop(run), reason)

    def fail(self, run: str, error: str) -> None:
        """Record a failed run. Other workers may retry it; this one does not."""
        self._failed[as_text(self._leases[run].configuration)] = error
        self.release(run, error)

    def release_all(self, reason: str) -> None:
        for run in list(self._leases):
            self.release(run, reason)

    def rows(self) -> list[Row]:
        """All configurations in the order of the list or of the proposals."""
        trials = self.trials.read()
        taken, measured = live(trials), measured_in(trials)
        found = []
        for configuration in self._configurations(trials):
            text, state, problem = as_text(configuration), "open", ""
            if text in measured:
                state = measured[text].state
            elif text in taken:
                state = "running"
                problem = _worker_name(taken[text].user_attrs[WORKER])
            elif text in self._failed:
                state, problem = "failed", self._failed[text]
            found.append(Row(configuration, self.spec(configuration), measured.get(text), state, problem))
        return found

    def done(self, rows: Sequence[Row]) -> bool:
        return len(rows) >= self.wanted and all(row.measured for row in rows)

    def stuck(self, rows: Sequence[Row]) -> bool:
        """Whether all remaining runs failed here and no other worker has leased one."""
        left = [row for row in rows if row.measured is None]
        return len(rows) >= self.wanted and bool(left) and all(row.state == "failed" for row in left)

    def _configurations(self, trials: Sequence[Any]) -> list[Configuration]:
        if self._listed is not None:
            return list(self._listed)
        return [json.loads(text) for text in known(trials)[: self.wanted]]


def _worker_name(worker: Any) -> str:
    ours = this_worker()
    where = "here" if worker.get("host") == ours["host"] else f"on {worker.get('host')}"
    return f"process {worker.get('process')} {where}"
