"""The search space: a set of values per hyper-parameter, the configurations they form, and both for Optuna."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from aida.catalog import catalog
from aida_lab.parsing import UsageError, parse_values
from aida_lab.spec import Experiment

#: Random trials before TPE starts; Optuna's default.
_STARTUP = 10

#: The values of a configuration, by hyper-parameter.
Params = Mapping[str, Any]


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

    def listed_values(self) -> dict[str, BaseDistribution]:
        """Return distributions over the listed values only."""
        return {name: CategoricalDistribution(list(map(encode, values))) for name, values in self.sets.items()}

    def value_ranges(self) -> dict[str, BaseDistribution]:
        """Return log-uniform distributions between the ends of numeric sets, and the listed values of other sets."""
        found = self.listed_values()
        for name, (low, high) in self.ranges().items():
            whole = all(type(value) is int for value in self.sets[name])
            found[name] = (
                IntDistribution(int(low), int(high), log=True) if whole else FloatDistribution(low, high, log=True)
            )
        return found

    def propose(self, rdb: Any, study: str, seed: int) -> tuple[int, Params]:
        """Create a running trial with the next configuration that TPE proposes; returns both."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # constant_liar treats running trials as bad, so that workers do not all try the same region
            sampler = optuna.samplers.TPESampler(n_startup_trials=_STARTUP, seed=seed, constant_liar=True)
            trial = optuna.load_study(study_name=study, storage=rdb, sampler=sampler).ask(self.value_ranges())
        # the listed value that Optuna stores in its own form, or a number between the ends of a set
        listed = {name: {encode(value): value for value in values} for name, values in self.sets.items()}
        return trial._trial_id, {name: listed[name].get(param, param) for name, param in trial.params.items()}


def encode(value: Any) -> Any:
    """Return a value for Optuna, which cannot store tuples such as betas."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value)


def as_text(params: Params) -> str:
    """Return a text that is the same for equal configurations."""
    return json.dumps(dict(params), sort_keys=True)


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
