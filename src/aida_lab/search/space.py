"""The search space: a set of values per hyper-parameter, and the configurations they form."""

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

#: One value per hyper-parameter.
Configuration = Mapping[str, Any]


@dataclass(frozen=True)
class Space:
    """Sets of values by hyper-parameter; an empty space has one configuration, the tuned values."""

    sets: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sets", MappingProxyType(dict(self.sets)))

    def grid(self) -> list[dict[str, Any]]:
        """Return every configuration; the last hyper-parameter changes fastest."""
        return [dict(zip(self.sets, values, strict=True)) for values in itertools.product(*self.sets.values())]

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the ends of each set of positive numbers that differ; a sampler can try values between them."""
        found = {}
        for name, values in self.sets.items():
            if all(type(value) in (int, float) and value > 0 for value in values) and len(set(values)) > 1:
                found[name] = (float(min(values)), float(max(values)))
        return found


def as_text(configuration: Configuration) -> str:
    """Return a text that is the same for equal configurations."""
    return json.dumps(dict(configuration), sort_keys=True)


def space_of(
    experiment: Experiment,
    optimizer: str,
    given: Mapping[str, Any] | None = None,
    over: Mapping[str, tuple[Any, ...]] | None = None,
) -> Space:
    """Return the paper's sets for an optimizer without the values ``given``; sets in ``over`` replace the paper's."""
    given, over = given or {}, over or {}
    if both := sorted(set(given) & set(over)):
        raise UsageError(f"--set and --over both name {', '.join(both)}: a value is either fixed or searched; keep one")
    paper = {} if {":", "+"}.intersection(optimizer) else experiment.searched(optimizer)
    return Space({name: values for name, values in {**paper, **over}.items() if name not in given})


def parse_sets(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Parse ``["eps=1e-8,1e-9"]`` to ``{"eps": (1e-8, 1e-9)}``."""
    try:
        found = parse_values(texts)
    except UsageError as error:
        raise UsageError(str(error).replace("--set", "--over")) from None
    sets = {name: value if isinstance(value, tuple) else (value,) for name, value in found.items()}
    for name, values in sets.items():
        if not values:
            raise UsageError(f"--over {name}=(): the set is empty; write it as {name}=V1,V2")
    return sets


def methods_of(experiment: Experiment) -> tuple[str, ...]:
    """Return the methods of the experiment's table; without a table, those that the experiment has values for."""
    if experiment.paper:
        return tuple(experiment.paper)
    return ("aida-k1", "aida-k2", *(name for name in catalog() if name in experiment.tuning and name != "aida"))
