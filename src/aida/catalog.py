"""Every optimizer of the comparison by name: its paper, its rule, its defaults and its stepsizes.

A baseline is one file in ``aida.baselines`` that ends in ``ENTRIES``. It needs no other registration.
The first call of :func:`catalog` imports the files.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from aida._suggest import did_you_mean
from aida.optimizer import Aida
from aida.readings import Reading, inner_eps


@dataclass(frozen=True)
class Paper:
    """Where a method comes from."""

    authors: str
    title: str
    year: int
    #: Identifier at arxiv.org; None if the paper is not there.
    arxiv: str | None = None

    def __str__(self) -> str:
        where = f", arXiv:{self.arxiv}" if self.arxiv else ""
        return f"{self.authors}: {self.title} ({self.year}{where})"


@dataclass(frozen=True)
class Entry:
    """One optimizer of the catalog."""

    #: The name on the command line.
    name: str
    #: The name in tables and figures.
    title: str
    optimizer: type[Optimizer]
    paper: Paper
    #: The update in one line; t counts from 1, m^ and v^ are bias-corrected.
    rule: str
    #: Values that :meth:`build` uses unless others are given.
    defaults: Mapping[str, Any]
    #: How the adaptive stepsizes are read out of the state.
    reading: Reading
    #: How it differs from torch's version, or from the code behind the published comparison.
    notes: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", MappingProxyType(dict(self.defaults)))

    def build(self, params: ParamsT, **hyper: Any) -> Optimizer:
        """Build the optimizer for ``params``; an unknown argument is a TypeError, as for any constructor."""
        return self.optimizer(params, **{**self.defaults, **hyper})


# Modules whose optimizers wrap another one without being one of its class, with the attribute that holds it.
WRAPPERS = {"accelerate.optimizer": "optimizer", "timm.optim.lookahead": "_base_optimizer"}

AIDA_PAPER = Paper(
    "G. Zhang, K. Niwa, W. B. Kleijn",
    "A DNN Optimizer that Improves over AdaBelief by Suppression of the Adaptive Stepsize Range",
    2022,
    "2203.13273",
)

AIDA = Entry(
    name="aida",
    title="Aida",
    optimizer=Aida,
    paper=AIDA_PAPER,
    rule="v = beta2 v + (1 - beta2)(m' - g')^2 + eps; p -= lr m^ / sqrt(v^), m' and g' the mutually projected m and g",
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "projections": 2, "xi": 1e-20},
    reading=inner_eps("exp_avg_var"),
    notes=(
        "Weight decay is decoupled by default. The authors' code adds it to the gradient (L2): "
        "decoupled_weight_decay=False."
    ),
)


@cache
def catalog() -> Mapping[str, Entry]:
    """All entries by name: Aida first, then by the year of the paper."""
    import aida.baselines

    rivals: list[Entry] = []
    for module in pkgutil.iter_modules(aida.baselines.__path__):
        rivals += getattr(importlib.import_module(f"aida.baselines.{module.name}"), "ENTRIES", ())
    rivals.sort(key=lambda entry: entry.paper.year)
    entries: dict[str, Entry] = {}
    for entry in (AIDA, *rivals):
        if entry.name in entries:
            raise ValueError(f"two entries of the catalog are called {entry.name!r}; names must differ")
        entries[entry.name] = entry
    return MappingProxyType(entries)


def find(name: str) -> Entry:
    """Return the entry of an optimizer.

    Args:
        name (str): its name or its title; ``AdaBelief*`` and ``adabelief_star`` find ``adabelief-star``.
    """
    entries = catalog()
    wanted = name.strip().lower().replace("_", "-")
    for entry in entries.values():
        if wanted in (entry.name, entry.title.lower()):
            return entry
    hint = did_you_mean(wanted, entries)
    raise LookupError(f"no optimizer is called {name!r}; {hint}known are {', '.join(entries)}")


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that accelerate or timm's Lookahead has wrapped; any other as it is."""
    while inside := next((WRAPPERS[m] for kind in type(optimizer).__mro__ if (m := kind.__module__) in WRAPPERS), None):
        optimizer = getattr(optimizer, inside)
    return optimizer


def reading_for(optimizer: Optimizer) -> Reading:
    """Return how to read the stepsizes of an optimizer of the catalog or of a known class of torch."""
    known = _readings()
    for kind in type(optimizer).__mro__:
        if kind in known:
            return known[kind]
    names = sorted({f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in known})
    raise TypeError(
        f"no reading of {type(optimizer).__name__}'s stepsizes is known; known are {', '.join(names)}. For another "
        "optimizer pass an aida.readings.Reading of your own"
    )


@cache
def _readings() -> Mapping[type, Reading]:
    from aida.baselines.torch_native import OTHER_READINGS

    return {**OTHER_READINGS, **{entry.optimizer: entry.reading for entry in catalog().values()}}
