"""The experiments by name. Each file here ends in ``EXPERIMENTS``; an experiment needs no other registration."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from aida._suggest import did_you_mean
from aida_lab.spec import Experiment


@cache
def experiments() -> Mapping[str, Experiment]:
    """Return all experiments by name in the order of the paper's tables; ``digits``, our own, comes first."""
    declared: list[Experiment] = []
    for module in pkgutil.iter_modules(__path__):
        declared += importlib.import_module(f"{__name__}.{module.name}").EXPERIMENTS
    declared.sort(key=lambda each: (each.table, each.name))
    return MappingProxyType({each.name: each for each in declared})


def find_experiment(name: str) -> Experiment:
    """Return the experiment of that name."""
    known = experiments()
    if name in known:
        return known[name]
    raise LookupError(f"no experiment is called {name!r}; {did_you_mean(name, known)}known are {', '.join(known)}")
