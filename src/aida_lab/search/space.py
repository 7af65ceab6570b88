"""What is searched: a set of values for each hyper-parameter, and the configurations they make."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aida.catalog import catalog
from aida_lab.parsing import UsageError, parse_values
from aida_lab.spec import Experiment

#: Values by hyper-parameter.
Configuration = Mapping[str, Any]


@dataclass(frozen=True)
class Space:
    """Sets of values by hyper-parameter; without any there is one configuration, the tuned values."""

    sets: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sets", MappingProxyType(dict(self.sets)))

    def grid(self) -> list[dict[str, Any]]:
        """Every configuration, the last hyper-parameter changing fastest."""
        return [dict(zip(self.sets, values, strict=True)) for values in itertools.product(*self.sets.values())]

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The ends of each set that has two different positive numbers: what lies between them can be tried too."""
        found = {}
        for name, values in self.sets.items():
            if all(type(value) in (int, float) and value > 0 for value in values) and len(set(values)) > 1:
                found[name] = (float(min(values)), float(max(values)))
        return found


def as_text(configuration: Configuration) -> str:
    """One text for equal configurations."""
    return json.dumps(dict(configuration), sort_keys=True)


def space_of(
    experiment: Experiment,
    optimizer: str,
    given: Mapping[str, Any] | None = None,
    over: Mapping[str, tuple[Any, ...]] | None = None,
) -> Space:
    """The paper's sets for an optimizer, less what is ``given``; sets ``over`` which to search replace its own."""
    given, over = given or {}, over or {}
    if both := sorted(set(given) & set(over)):
        raise UsageError(f"--set and --over both name {', '.join(both)}: a value is fixed or searched; keep one")
    paper = {} if ":" in optimizer else experiment.searched(optimizer)
    return Space({name: values for name, values in {**paper, **over}.items() if name not in given})


def parse_sets(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """``["eps=1e-8,1e-9"]`` as ``{"eps": (1e-8, 1e-9)}``."""
    try:
        found = parse_values(texts)
    except UsageError as error:
        raise UsageError(str(error).replace("--set", "--over")) from None
    sets = {name: value if isinstance(value, tuple) else (value,) for name, value in found.items()}
    for name, values in sets.items():
        if not values:
            raise UsageError(f"--over {name}=(): a set of no values; write them as {name}=V1,V2")
    return sets


def methods_of(experiment: Experiment) -> tuple[str, ...]:
    """The methods of the experiment's table; without a table, those that the experiment has values for."""
    if experiment.paper:
        return tuple(experiment.paper)
    return ("aida-k1", "aida-k2", *(name for name in catalog() if name in experiment.tuning and name != "aida"))
