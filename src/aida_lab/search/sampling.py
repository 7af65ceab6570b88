"""Configurations in Optuna's terms, and where it has a say: which to try next, and which to give up."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from aida_lab.search.plan import Plan
from aida_lab.search.space import Configuration, Space

#: Seeds of repetitions: any.
SEEDS: Mapping[str, BaseDistribution] = {"seed": IntDistribution(0, 2**62)}

#: Trials that TPE draws at random before it learns from them, as Optuna has it too.
_STARTUP = 10
#: Trials that end before the first is given up, as Optuna has it too.
_MEDIAN_OF = 5


def as_listed(space: Space) -> dict[str, BaseDistribution]:
    """The values of each set and no others."""
    return {name: CategoricalDistribution([encoded(value) for value in values]) for name, values in space.sets.items()}


def in_between(space: Space) -> dict[str, BaseDistribution]:
    """All between the ends of each set, decades alike; as listed where there is nothing between."""
    found = as_listed(space)
    for name, (low, high) in space.ranges().items():
        whole = all(type(value) is int for value in space.sets[name])
        found[name] = (
            IntDistribution(int(low), int(high), log=True) if whole else FloatDistribution(low, high, log=True)
        )
    return found


def encoded(value: Any) -> Any:
    """A value as Optuna keeps it, which knows no pairs of betas."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value)


def decoded(params: Mapping[str, Any], space: Space) -> Configuration:
    """What was encoded, by the values of the space."""
    found = {}
    for name, param in params.items():
        listed = [value for value in space.sets[name] if encoded(value) == param]
        found[name] = listed[0] if listed else param
    return found


def proposed(rdb: Any, name: str, space: Space, seed: int) -> optuna.trial.Trial:
    """A new running trial with the configuration that TPE would try next."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # running trials count as bad ones, so that workers do not all try the same place
        sampler = optuna.samplers.TPESampler(n_startup_trials=_STARTUP, seed=seed, constant_liar=True)
        study = optuna.load_study(study_name=name, storage=rdb, sampler=sampler)
        return study.ask(in_between(space))


def pruner_of(plan: Plan) -> optuna.pruners.BasePruner | None:
    """What decides on giving a run up; None where nothing does."""
    if plan.pruner == "none":
        return None
    # curves of different stepsizes cross early: in the first quarter nothing is given up
    return optuna.pruners.MedianPruner(n_startup_trials=_MEDIAN_OF, n_warmup_steps=plan.base.epochs // 4 + 1)
