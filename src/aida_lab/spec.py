"""What an experiment is and what a run is, as frozen values.

A :class:`RunSpec` holds everything that determines a run's numbers on a given machine; its hash names the
run's folder. The code of an optimizer outside the catalog, and the data, are described in the run's record.
An optimizer's defaults are overridden by the experiment's values for it, and those by the user's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from aida.catalog import find
from aida_lab.schedules import Schedule

if TYPE_CHECKING:
    from aida_lab.task import Task, TaskContext

#: "bf16" is autocast over float32 parameters; "bf16-true" stores the parameters in bf16, too.
Precision = Literal["fp32", "tf32", "bf16", "bf16-true"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "bf16-true")

#: Increased when the meaning of a field changes, so that older runs are not mistaken for newer ones.
FORMAT = 1


@dataclass(frozen=True)
class Metric:
    """The number that ranks the runs of an experiment: a key of the curve's rows."""

    key: str
    title: str
    better: Literal["higher", "lower"]

    def improves(self, new: float, best: float | None) -> bool:
        """Whether ``new`` is better than the best so far. NaN never improves; any number improves on NaN or None."""
        if new != new:
            return False
        return best is None or best != best or self.sort_key(new) < self.sort_key(best)

    def sort_key(self, value: float) -> float:
        """A number to sort by: the best value has the lowest."""
        return -value if self.better == "higher" else value


@dataclass(frozen=True)
class PaperResult:
    """What the paper reports for one method; ``std`` and ``seconds`` (per epoch) if it gives them."""

    mean: float
    std: float | None = None
    seconds: float | None = None
    best: bool = False  #: whether it is the best of all configurations and repetitions instead of a mean


@dataclass(frozen=True)
class Tuning:
    """The values of one optimizer in one experiment; the optimizer's defaults fill in the rest."""

    fixed: Mapping[str, Any] = field(default_factory=dict)  #: values that the paper's appendix fixes
    searched: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  #: sets of values that it searched

    def __post_init__(self) -> None:
        for name in ("fixed", "searched"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))


@dataclass(frozen=True)
class Switch:
    """When SGD is replaced by ASGD: ``key`` is above its lowest value of all but the last ``interval`` epochs."""

    key: str
    interval: int


@dataclass(frozen=True)
class Experiment:
    """One task of the comparison, with the values of every optimizer for it."""

    name: str
    title: str
    table: str  #: the table of the paper, such as "III"; empty if the experiment is not in the paper
    data: tuple[str, ...]  #: the names of its data sets in ``aida data``
    task: Callable[[TaskContext], Task]  #: creates model, data and evaluation on a device; called when a run starts
    parameters: int
    epochs: int
    batch: int
    schedule: Schedule
    metrics: Mapping[str, Metric]  #: the metric of each variant; the first variant is the default
    #: Values by optimizer; an entry for a method, such as "aida-k1", comes before that for its optimizer.
    tuning: Mapping[str, Tuning] = field(default_factory=dict)
    #: What the paper reports, by method (:attr:`RunSpec.method`).
    paper: Mapping[str, PaperResult] = field(default_factory=dict)
    paper_variant: str = ""  #: the variant that these results belong to; by default the first
    #: Variants in which SGD is replaced by ASGD; the paper's result for SGD belongs to these too.
    switches: Mapping[str, Switch] = field(default_factory=dict)
    #: The data sets of variants that read other ones.
    variant_data: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    compiled: bool = False  #: whether compiling the model pays off on a GPU; it takes most of a minute at the start
    #: Whether weight decay applies to parameters of two or more dimensions only, not to biases and norms.
    decays_matrices_only: bool = False
    #: How several processes under torchrun train it together: each with the whole model, or with a part of it.
    distributed: Literal["", "ddp", "fsdp"] = ""
    probe_every: int = 391  #: steps between two stepsize measurements for ``--probe`` without a number
    notes: str = ""  #: what a reader must know: traps of the public code, and our choices if the paper says nothing

    def __post_init__(self) -> None:
        for name in ("metrics", "tuning", "paper", "switches", "variant_data"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        object.__setattr__(self, "paper_variant", self.paper_variant or self.variants[0])

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.metrics)

    def paper_results(self, variant: str) -> Mapping[str, PaperResult]:
        """The paper's results that runs of a variant compare with."""
        if variant == self.paper_variant:
            return self.paper
        return {method: result for method, result in self.paper.items() if method == "sgd" and variant in self.switches}

    def reads(self, variant: str) -> tuple[str, ...]:
        """The data sets of a variant."""
        return self.variant_data.get(variant, self.data)

    def tuning_of(self, optimizer: str, given: Mapping[str, Any] | None = None) -> Tuning | None:
        """The entry of :attr:`tuning` for an optimizer with these values; None if the experiment has none."""
        entry = find(optimizer)
        method = method_of(entry.name, {**entry.defaults, **(given or {})})
        return self.tuning.get(method) or self.tuning.get(entry.name)

    def tuned(self, optimizer: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The optimizer's values for this experiment: its defaults, then the fixed values, then ``given``."""
        tuning = self.tuning_of(optimizer, given) or Tuning()
        return {**find(optimizer).defaults, **tuning.fixed, **(given or {})}

    def untuned(self, optimizer: str, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a run's values that differ from the tuned ones."""
        # the number of projections is part of the method's name, and the tuned values depend on it
        named = {name: value for name, value in hyper.items() if name == "projections"}
        tuned = _as_json(self.tuned(optimizer, named))
        return {name: value for name, value in hyper.items() if name not in tuned or tuned[name] != value}

    def searched(self, optimizer: str) -> Mapping[str, tuple[Any, ...]]:
        """The sets that the paper searched for this optimizer, by hyper-parameter."""
        tuning = self.tuning_of(optimizer)
        return tuning.searched if tuning else {}

    def not_in_paper(self, optimizer: str, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a run's values that the paper neither fixes nor searched; none if it gives no values at all."""
        if self.tuning_of(optimizer) is None:
            return {}
        sets = _as_json(dict(self.searched(optimizer)))
        fixed = self.untuned(optimizer, {name: value for name, value in hyper.items() if name not in sets})
        return {**fixed, **{name: value for name, value in hyper.items() if name in sets and value not in sets[name]}}


@dataclass(frozen=True)
class RunSpec:
    """Everything that determines a run's numbers on a given machine."""

    experiment: str
    optimizer: str  #: a name in the catalog, or ``module:Class``
    hyper: Mapping[str, Any]  #: every hyper-parameter, resolved
    seed: int
    epochs: int
    batch: int
    precision: Precision
    variant: str = "default"  #: one of the experiment's variants
    compiled: bool = False  #: whether the model is compiled; compiled kernels round differently
    deterministic: bool = False  #: whether only deterministic kernels are used; all are on a CPU
    probe_every: int = 0  #: steps between two stepsize measurements; 0 for none
    #: The most batches per epoch and per evaluation; None for all. For trials, not for tables.
    limit: int | None = None
    warmup: int = 0  #: steps of linear warm-up to the experiment's schedule; 0 for none

    def __post_init__(self) -> None:
        # as read from JSON, so that a spec read from its file equals the one written
        hyper = _as_json(dict(self.hyper))
        if self.optimizer == "aida":  # the default at the time of runs whose specs lack the value
            hyper.setdefault("decoupled_weight_decay", False)
        object.__setattr__(self, "hyper", MappingProxyType(hyper))

    @property
    def method(self) -> str:
        """The name in tables: the optimizer's name, with the number of projections for Aida."""
        return method_of(self.optimizer, self.hyper)

    @property
    def key(self) -> str:
        """The hash that names the run's folder."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __reduce__(self) -> Any:
        return type(self).from_json, (self.to_json(),)  # a mapping proxy cannot be pickled

    def to_json(self) -> dict[str, Any]:
        content = {"format": FORMAT, **vars(self), "hyper": dict(self.hyper)}
        # fields that are newer than some runs are left out at their first meaning: old runs keep their names
        if not self.warmup:
            del content["warmup"]
        if self.optimizer == "aida" and not self.hyper["decoupled_weight_decay"]:
            del content["hyper"]["decoupled_weight_decay"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunSpec:
        """Return the spec that a file holds; ValueError if it holds none."""
        known = {each.name for each in fields(cls)}
        given = {"warmup": 0, **{key: value for key, value in content.items() if key != "format"}}
        if content.get("format") != FORMAT or set(given) != known:
            odd = sorted(set(given) ^ known)
            raise ValueError(
                f"no spec of format {FORMAT}: format {content.get('format')!r}"
                + (f", fields missing or unknown: {', '.join(odd)}" if odd else "")
            )
        return cls(**given)


def method_of(optimizer: str, hyper: Mapping[str, Any]) -> str:
    """The name of an optimizer in tables: ``aida-k1`` for Aida with one projection, otherwise its own."""
    return f"aida-k{hyper['projections']}" if optimizer == "aida" else optimizer


def _as_json(value: Any) -> Any:
    """Return the value as read from a JSON file: lists instead of tuples."""
    return json.loads(json.dumps(value))
