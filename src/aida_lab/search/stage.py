"""One part of a search, its configurations or its repetitions: what is open, what is ours, what is measured."""

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
from aida_lab.search.trials import WORKER, Claim, Trials, known, live, measured_in
from aida_lab.spec import RunSpec

#: Makes a new configuration ours, None where there are enough; see :meth:`Trials.propose`.
Propose = Callable[[Trials], Claim | None]


@dataclass(frozen=True)
class Row:
    """One configuration, as far as it is."""

    configuration: Configuration
    spec: RunSpec
    #: None where it is not measured.
    measured: Measured | None
    #: In a word, and where it is not measured, why.
    state: str
    problem: str = ""


class Stage:
    """The configurations of one study; without a list of them, those that ``propose`` has brought."""

    def __init__(
        self,
        trials: Trials,
        spec_of: Callable[[Configuration], RunSpec],
        value_of: Callable[[Measured], float],
        listed: Sequence[Configuration] | None = None,
        propose: Propose | None = None,
        wanted: int | None = None,
    ) -> None:
        self.trials = trials
        self.wanted = len(listed or ()) if wanted is None else wanted
        self._listed, self._propose, self._value_of, self._make_spec = listed, propose, value_of, spec_of
        self._specs: dict[str, RunSpec] = {}
        self._seen: dict[str, Measured] = {}
        #: Ours, by the key of the run.
        self._claims: dict[str, Claim] = {}
        #: Runs that broke here, by configuration: not tried again in this process.
        self._failed: dict[str, str] = {}

    def claim(self, out: Path, avoided: set[str]) -> RunSpec | None:
        """The next run for this worker; None where there is none for now."""
        choose: Callable[[list[Configuration]], Configuration] = operator.itemgetter(0)
        while free := self._free(out, avoided):
            configuration = choose(free)
            spec = self.spec(configuration)
            if (claim := self.trials.claim(configuration, spec.key)) is not None:
                self._claims[spec.key] = claim
                return spec
            choose = random.choice  # where many begin at once, they would all meet again at the next one
        proposed = self._propose(self.trials) if self._propose else None
        if proposed is None:
            return None
        spec = self.spec(proposed.configuration)
        self._claims[spec.key] = proposed
        return spec

    def _free(self, out: Path, avoided: set[str]) -> list[Configuration]:
        """Configurations that nobody measures, and that we may."""
        trials = self.trials.without_the_dead()
        self._seen, taken = measured_in(trials), {*live(trials), *self._failed}
        found = [each for each in self._configurations(trials) if as_text(each) not in taken]
        return [each for each in found if (key := self.spec(each).key) not in avoided and not is_held(out / key / LOCK)]

    def spec(self, configuration: Configuration) -> RunSpec:
        text = as_text(configuration)
        if text not in self._specs:
            self._specs[text] = self._make_spec(configuration)
        return self._specs[text]

    def listed(self) -> list[RunSpec]:
        """The runs that are known beforehand."""
        return [self.spec(configuration) for configuration in self._listed or ()]

    def measured(self) -> list[tuple[RunSpec, Measured]]:
        """What was found measured when last claimed from."""
        return [(self.spec(json.loads(text)), measured) for text, measured in self._seen.items()]

    def held(self, run: str) -> Claim | None:
        """Our claim on a run."""
        return self._claims.get(run)

    def spec_of(self, run: str) -> RunSpec:
        """The spec of a run that is ours."""
        return self.spec(self._claims[run].configuration)

    def complete(self, run: str, measured: Measured) -> None:
        self.trials.complete(self._claims.pop(run), measured, self._value_of(measured))

    def prune(self, run: str, measured: Measured) -> None:
        self.trials.prune(self._claims.pop(run), measured)

    def give_back(self, run: str, reason: str) -> None:
        self.trials.give_back(self._claims.pop(run), reason)

    def fail(self, run: str, error: str) -> None:
        """Its run broke: others may try it, we do not again."""
        self._failed[as_text(self._claims[run].configuration)] = error
        self.give_back(run, error)

    def give_back_all(self, reason: str) -> None:
        for run in list(self._claims):
            self.give_back(run, reason)

    def rows(self) -> list[Row]:
        """All configurations, in the order of the list or of the proposals."""
        trials = self.trials.read()
        taken, measured = live(trials), measured_in(trials)
        found = []
        for configuration in self._configurations(trials):
            text, state, problem = as_text(configuration), "open", ""
            if text in measured:
                state = measured[text].state
            elif text in taken:
                state = "running"
                problem = _in_words(taken[text].user_attrs[WORKER])
            elif text in self._failed:
                state, problem = "failed", self._failed[text]
            found.append(Row(configuration, self.spec(configuration), measured.get(text), state, problem))
        return found

    def done(self, rows: Sequence[Row]) -> bool:
        return len(rows) >= self.wanted and all(row.measured for row in rows)

    def stuck(self, rows: Sequence[Row]) -> bool:
        """Whether all that is left broke here, and nobody else is at it."""
        left = [row for row in rows if row.measured is None]
        return len(rows) >= self.wanted and bool(left) and all(row.state == "failed" for row in left)

    def _configurations(self, trials: Sequence[Any]) -> list[Configuration]:
        if self._listed is not None:
            return list(self._listed)
        return [json.loads(text) for text in known(trials)[: self.wanted]]


def _in_words(worker: Any) -> str:
    ours = this_worker()
    where = "here" if worker.get("host") == ours["host"] else f"on {worker.get('host')}"
    return f"process {worker.get('process')} {where}"
