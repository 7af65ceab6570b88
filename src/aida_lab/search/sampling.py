"""Configurations as Optuna distributions, and the samplers and pruners that Optuna provides."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from aida_lab.search.plan import Plan
from aida_lab.search.space import Params, Space

#: Distribution of the seeds of repetitions.
SEEDS: Mapping[str, BaseDistribution] = {"seed": IntDistribution(0, 2**62)}

#: Random trials before TPE starts; Optuna's default.
_STARTUP = 10
#: Trials that must end before the first is pruned; Optuna's default.
_PRUNER_STARTUP = 5


def listed_values(space: Space) -> dict[str, BaseDistribution]:
    """Distributions over the listed values only."""
    return {name: CategoricalDistribution([encode(value) for value in values]) for name, values in space.sets.items()}


def value_ranges(space: Space) -> dict[str, BaseDistribution]:
    """Log-uniform distributions between the ends of each numeric set; the listed values for other sets."""
    found = listed_values(space)
    for name, (low, high) in space.ranges().items():
        whole = all(type(value) is int for value in space.sets[name])
        found[name] = (
            IntDistribution(int(low), int(high), log=True) if whole else FloatDistribution(low, high, log=True)
        )
    return found


def encode(value: Any) -> Any:
    """Encode a value for Optuna, which cannot store tuples such as betas."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value)


def _decode(param: Any, values: tuple[Any, ...]) -> Any:
    """The listed value that Optuna stores as ``param``; otherwise it is a number between the ends of the set."""
    return next((value for value in values if encode(value) == param), param)


def propose(rdb: Any, name: str, space: Space, seed: int) -> tuple[int, Params]:
    """Create a running trial with the next configuration that TPE proposes; returns both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # constant_liar treats running trials as bad, so that workers do not all try the same region
        sampler = optuna.samplers.TPESampler(n_startup_trials=_STARTUP, seed=seed, constant_liar=True)
        study = optuna.load_study(study_name=name, storage=rdb, sampler=sampler)
        trial = study.ask(value_ranges(space))
    return trial._trial_id, {name: _decode(param, space.sets[name]) for name, param in trial.params.items()}


def pruner_of(plan: Plan) -> optuna.pruners.BasePruner | None:
    """The pruner of a plan; None if it has none."""
    if plan.pruner == "none":
        return None
    # no pruning in the first quarter: curves of different learning rates often cross there
    return optuna.pruners.MedianPruner(n_startup_trials=_PRUNER_STARTUP, n_warmup_steps=plan.base.epochs // 4 + 1)
