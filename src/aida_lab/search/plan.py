"""One optimizer's search as a value: what is tried, how it is judged, what is repeated."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aida_lab.external import source_of
from aida_lab.parsing import UsageError
from aida_lab.request import RunRequest
from aida_lab.search.space import Configuration, Space, as_text, space_of
from aida_lab.spec import Metric, RunSpec

By = Literal["best", "last"]
Sampler = Literal["grid", "tpe"]
Pruner = Literal["none", "median"]

#: Changes with the meaning of a search, so that a search begun before is not gone on with after.
FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """Made by :func:`plan_of`, which settles the values of the space."""

    #: A search run, but for what is searched: one optimizer, one seed.
    request: RunRequest
    space: Space
    #: Seeds of the repetitions at the best configuration, and their epochs; None for the experiment's own number.
    seeds: tuple[int, ...] = (0, 1, 2)
    repeat_epochs: int | None = None
    #: Which epoch of a run counts.
    by: By = "best"
    sampler: Sampler = "grid"
    #: Configurations to try where the sampler could go on for ever.
    trials: int = 20
    pruner: Pruner = "none"
    #: What names the study; from the rest.
    base: RunSpec = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", self.spec(self.space.grid()[0]))

    @property
    def method(self) -> str:
        return self.base.method

    @property
    def metric(self) -> Metric:
        return self.request.experiment.metrics[self.base.variant]

    @property
    def shortened(self) -> bool:
        """Whether search runs are shorter than the repetitions."""
        return self.base.epochs < self.repetition(self.base, 0).epochs

    @property
    def wanted(self) -> int:
        """Configurations to measure."""
        return len(self.space.grid()) if self.sampler == "grid" else self.trials

    def spec(self, configuration: Configuration) -> RunSpec:
        """The search run of a configuration."""
        return replace(self.request, given={**self.request.given, **configuration}).specs()[0]

    def repetition(self, spec: RunSpec, seed: int) -> RunSpec:
        """A repetition at the configuration of a search run."""
        epochs = self.request.experiment.epochs if self.repeat_epochs is None else self.repeat_epochs
        return replace(spec, seed=seed, epochs=epochs)

    def about(self) -> dict[str, Any]:
        """All that makes the search what it is: the same command finds it again, and another does not mix with it."""
        spec = self.base.to_json()
        fixed = {name: value for name, value in spec["hyper"].items() if name not in self.space.sets}
        return {
            "format": FORMAT,
            **self._source(),
            "spec": {**spec, "hyper": fixed},
            "space": {name: list(values) for name, values in self.space.sets.items()},
            "by": self.by,
            "sampler": self.sampler,
            "pruner": self.pruner,
        }

    @property
    def name(self) -> str:
        """Of the study, and of the file with its results."""
        text = json.dumps(self.about(), sort_keys=True)
        return self._named(hashlib.sha256(text.encode()).hexdigest()[:12])

    def repetitions_name(self, spec: RunSpec) -> str:
        """Of the study of the repetitions at a configuration, whichever search found it."""
        source = "".join(f"-{each}" for each in self._source().values())
        return self._named(f"repeated-{self.repetition(spec, 0).key[:12]}{source}")

    def _source(self) -> dict[str, str]:
        """Of an optimizer that is not of the catalog, the code: what an edited one gives is another search."""
        return {"source": str(source_of(self.base.optimizer))} if ":" in self.base.optimizer else {}

    def _named(self, end: str) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "-", f"{self.base.experiment}-{self.method}-{end}")


def plan_of(
    request: RunRequest, optimizer: str, over: Mapping[str, tuple[Any, ...]] | None = None, **rest: Any
) -> Plan:
    """The search of an optimizer by runs as in ``request``; UsageError or LookupError where it makes no sense."""
    request = replace(request, optimizers=(optimizer,))
    bare = request.specs()[0]
    rough = Plan(request, space_of(request.experiment, bare.optimizer, request.given, over), **rest)
    first = rough.space.grid()[0]
    # as the optimizer takes them, so that lr=1 and lr=1.0 are one search
    sets = {
        name: _each_once(rough.spec({**first, name: value}).hyper[name] for value in values)
        for name, values in rough.space.sets.items()
    }
    plan = replace(rough, space=Space(sets))
    if plan.wanted == 1:  # nothing to choose by a shortened run: its search is one of the repetitions
        plan = replace(plan, request=replace(request, epochs=plan.repeat_epochs))
    if plan.sampler == "tpe" and not plan.space.ranges():
        raise UsageError(
            f"--sampler tpe: nothing between two numbers can be tried for {plan.method} on "
            f"{request.experiment.name}; give it such a set (--over lr=0.1,0.001), or leave the sampler out"
        )
    return plan


def _each_once(values: Any) -> tuple[Any, ...]:
    return tuple({as_text({"value": value}): value for value in values}.values())
