"""The experiments by name. One is declared at the end of a file here, in ``EXPERIMENTS``, and needs no registration."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from aida.lab.spec import Experiment


@cache
def experiments() -> Mapping[str, Experiment]:
    """All experiments by name, in the order of the paper's tables; ``digits``, which is ours, first."""
    declared: list[Experiment] = []
    for module in pkgutil.iter_modules(__path__):
        declared += importlib.import_module(f"{__name__}.{module.name}").EXPERIMENTS
    declared.sort(key=lambda each: (each.table, each.name))
    return MappingProxyType({each.name: each for each in declared})


def find_experiment(name: str) -> Experiment:
    """The experiment of that name."""
    known = experiments()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise LookupError(f"no experiment is called {name!r}; {hint}known are {', '.join(known)}")
