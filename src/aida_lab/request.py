"""From the arguments of a command to the specs of its runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aida.catalog import find
from aida_lab.external import REST, import_optimizer, pair
from aida_lab.parsing import UsageError, resolve
from aida_lab.spec import PRECISIONS, Experiment, RunSpec


@dataclass(frozen=True)
class RunRequest:
    """An experiment with some optimizers and seeds. The experiment or the device decides what is None."""

    experiment: Experiment
    #: Names in the catalog, ``aida-k1`` for Aida with one projection, ``module:Class``, or ``first+rest`` for two.
    optimizers: tuple[str, ...] = ("aida",)
    given: Mapping[str, Any] = field(default_factory=dict)  #: hyper-parameters for all of them
    seeds: tuple[int, ...] = (0,)
    device: str = "cpu"
    epochs: int | None = None
    precision: str | None = None
    variant: str | None = None
    compiled: bool | None = None
    deterministic: bool = False
    #: Steps between two stepsize measurements; None for the experiment's number, 0 for no measurement.
    probe_every: int | None = 0
    limit: int | None = None
    warmup: int = 0

    def specs(self) -> list[RunSpec]:
        """Return one spec per optimizer and seed, in this order; UsageError or LookupError if a value is invalid."""
        on_gpu = self.device.startswith("cuda")
        compiled = self.experiment.compiled and on_gpu if self.compiled is None else self.compiled
        rest: dict[str, Any] = {
            "experiment": self.experiment.name,
            "epochs": self.experiment.epochs if self.epochs is None else self.epochs,
            "batch": self.experiment.batch,
            "precision": self._precision(on_gpu),
            "variant": self._variant(),
            "compiled": compiled,
            "deterministic": self.deterministic,
            "probe_every": self._proposed_probe() if self.probe_every is None else self.probe_every,
            "limit": self.limit,
            "warmup": self.warmup,
        }
        methods = [self._method(name, dict(self.given)) for name in self.optimizers]
        specs = [
            RunSpec(optimizer=name, hyper=hyper, seed=seed, **rest) for name, hyper in methods for seed in self.seeds
        ]
        return list({spec.key: spec for spec in specs}.values())

    def _proposed_probe(self) -> int:
        """Return the experiment's number, about one epoch; at most the steps of a shortened epoch."""
        steps = self.experiment.probe_every
        return steps if self.limit is None else min(steps, self.limit)

    def _precision(self, on_gpu: bool) -> str:
        if self.precision is None:
            return "bf16" if on_gpu else "fp32"
        if self.precision not in PRECISIONS:
            raise UsageError(f"--precision {self.precision!r} is not one of {', '.join(PRECISIONS)}")
        return self.precision

    def _variant(self) -> str:
        known = self.experiment.variants
        if self.variant is None:
            return known[0]
        if self.variant not in known:
            raise UsageError(f"{self.experiment.name} has no variant {self.variant!r}; it has {', '.join(known)}")
        return self.variant

    def _method(self, name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        first, rest = pair(name)
        if first == "torch.optim:Muon":  # it accepts matrices only; these steps have the size of AdamW's
            rest, given = rest or "adamw", {"adjust_lr_fn": "match_rms_adamw", **given}
        if not rest:
            return self._single(name, given)
        if f"{REST}lr" in given:
            raise UsageError(f"{name}: both optimizers have the same learning rate; leave {REST}lr out")
        first, hyper = self._single(first, {key: given[key] for key in given if not key.startswith(REST)})
        of_rest = {key.removeprefix(REST): given[key] for key in given if key.startswith(REST)}
        rest, values = self._single(rest, of_rest)
        return f"{first}+{rest}", {**hyper, **{REST + key: values[key] for key in values if key != "lr"}}

    def _single(self, name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if match := re.fullmatch(r"aida-k(\d+)", name.strip().lower()):
            if given.get("projections", int(match[1])) != int(match[1]):
                raise UsageError(
                    f"--optimizer {name} and --set projections={given['projections']} contradict each other; keep one"
                )
            name, given["projections"] = "aida", int(match[1])
        if ":" in name:
            return name, resolve(name, import_optimizer(name), given, given)
        entry = find(name)
        return entry.name, resolve(entry.name, entry.optimizer, self.experiment.tuned(entry.name, given), given)
