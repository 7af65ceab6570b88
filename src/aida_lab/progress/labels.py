"""Labels of runs: method, values that differ from the tuned ones, seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from aida.catalog import catalog
from aida_lab.experiments import experiments
from aida_lab.spec import RunSpec

#: The fields of a spec besides method and seed. A label shows those in which the runs differ.
_OTHERS = tuple(each.name for each in fields(RunSpec) if each.name not in ("optimizer", "hyper", "seed"))


def differing(spec: RunSpec) -> dict[str, Any]:
    """The hyper-parameters that differ from the experiment's tuned ones; all, if either is not known here."""
    experiment = experiments().get(spec.experiment)
    if experiment is None or spec.optimizer not in catalog():
        return dict(spec.hyper)
    return experiment.untuned(spec.optimizer, spec.hyper)


def settings_in_words(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value_in_words(value)}" for name, value in values.items())


def labels(specs: Iterable[RunSpec]) -> dict[str, str]:
    """A distinct label for each run, by key."""
    specs = list(specs)
    others = [name for name in _OTHERS if len({getattr(spec, name) for spec in specs}) > 1]
    found = {}
    for spec in specs:
        shared = settings_in_words({name: getattr(spec, name) for name in others})
        parts = (spec.method, settings_in_words(differing(spec)), shared, f"seed {spec.seed}")
        found[spec.key] = " ".join(filter(None, parts))
    return found


def value_in_words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(value_in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
