"""The plan of one optimizer's search: what to try, how to compare runs, what to repeat."""

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
from aida_lab.search.space import Params, Space, as_text, space_of
from aida_lab.spec import Metric, RunSpec

By = Literal["best", "last"]
Sampler = Literal["grid", "tpe"]
Pruner = Literal["none", "median"]

#: Increased when the meaning of a search changes, so that older searches are not resumed.
FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """A search of one optimizer. Use :func:`plan_of`, which also normalizes the values of the space."""

    request: RunRequest  #: a search run without the searched values: one optimizer, one seed
    space: Space
    #: Seeds and epochs of the repetitions; None for the default epochs of the experiment.
    seeds: tuple[int, ...] = (0, 1, 2)
    repeat_epochs: int | None = None
    by: By = "best"  #: which epoch of a run to compare by
    sampler: Sampler = "grid"
    trials: int = 20  #: number of configurations to try if the sampler is not a grid
    pruner: Pruner = "none"
    base: RunSpec = field(init=False)  #: the first search run, which names the study

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
        """Number of configurations to measure."""
        return len(self.space.grid()) if self.sampler == "grid" else self.trials

    def spec(self, params: Params) -> RunSpec:
        """The search run of a configuration."""
        return replace(self.request, given={**self.request.given, **params}).specs()[0]

    def repetition(self, spec: RunSpec, seed: int) -> RunSpec:
        """Repeat the configuration of a search run with another seed."""
        epochs = self.request.experiment.epochs if self.repeat_epochs is None else self.repeat_epochs
        return replace(spec, seed=seed, epochs=epochs)

    def about(self) -> dict[str, Any]:
        """Everything that identifies the search, so that the same command resumes it and no other mixes with it."""
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
        """The name of the study and of its result file."""
        text = json.dumps(self.about(), sort_keys=True)
        return self._named(hashlib.sha256(text.encode()).hexdigest()[:12])

    def repetitions_name(self, spec: RunSpec) -> str:
        """The name of the study of the repetitions, which all searches with this best configuration share."""
        source = "".join(f"-{each}" for each in self._source().values())
        return self._named(f"repeated-{self.repetition(spec, 0).key[:12]}{source}")

    def _source(self) -> dict[str, str]:
        """The source hash of an optimizer outside the catalog, so that edited code is another search."""
        return {"source": str(source_of(self.base.optimizer))} if ":" in self.base.optimizer else {}

    def _named(self, end: str) -> str:
        return re.sub(r"[^A-Za-z0-9._-]", "-", f"{self.base.experiment}-{self.method}-{end}")


def plan_of(
    request: RunRequest, optimizer: str, over: Mapping[str, tuple[Any, ...]] | None = None, **rest: Any
) -> Plan:
    """Plan the search of an optimizer with runs like ``request``. Raises UsageError or LookupError if it is invalid."""
    request = replace(request, optimizers=(optimizer,))
    bare = request.specs()[0]
    rough = Plan(request, space_of(request.experiment, bare.optimizer, request.given, over), **rest)
    first = rough.space.grid()[0]
    # converted as the optimizer does, so that lr=1 and lr=1.0 are one search
    sets = {
        name: _each_once(rough.spec({**first, name: value}).hyper[name] for value in values)
        for name, values in rough.space.sets.items()
    }
    plan = replace(rough, space=Space(sets))
    if plan.wanted == 1:  # nothing to choose: the only search run is one of the repetitions
        plan = replace(plan, request=replace(request, epochs=plan.repeat_epochs))
    if plan.sampler == "tpe" and not plan.space.ranges():
        raise UsageError(
            f"--sampler tpe needs a range of numbers, and {plan.method} on {request.experiment.name} has none; "
            "add one (--over lr=0.1,0.001) or omit --sampler"
        )
    return plan


def _each_once(values: Any) -> tuple[Any, ...]:
    return tuple({as_text({"value": value}): value for value in values}.values())
