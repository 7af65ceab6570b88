"""What an experiment is and what a run is: frozen values, and how one becomes the other.

A :class:`RunSpec` holds all that decides a run's numbers on a given machine; its hash names the run's
folder. The code of an optimizer that is not of the catalog, and the data, are kept in the run's record.
Defaults of the experiment are overridden by the optimizer's tuned values, those by the user's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from aida.catalog import Entry, find
from aida_lab.external import import_optimizer
from aida_lab.schedules import Schedule

if TYPE_CHECKING:
    from aida_lab.task import Task, TaskContext

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")

#: Changes with the meaning of a spec's fields, so that runs made before are not taken for runs made after.
FORMAT = 1


@dataclass(frozen=True)
class Metric:
    """The number an experiment is judged by: a key of the curve's rows."""

    key: str
    title: str
    better: Literal["higher", "lower"]

    def improves(self, new: float, best: float | None) -> bool:
        """Whether ``new`` is better than the best so far; nothing is better than NaN, and anything than nothing."""
        if new != new:
            return False
        return best is None or best != best or (new > best if self.better == "higher" else new < best)


@dataclass(frozen=True)
class PaperResult:
    """What the paper reports for one method; ``std`` and ``seconds`` (an epoch) where it gives them."""

    mean: float
    std: float | None = None
    seconds: float | None = None
    #: The best of all configurations and repetitions instead of a mean.
    best: bool = False


@dataclass(frozen=True)
class Adjustment:
    """Values that replace tuned ones where an optimizer's other values are such."""

    optimizer: str
    where: Mapping[str, Any]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Switch:
    """When SGD gives way to ASGD: an epoch's ``key`` is above the lowest of all before it but the last ``interval``."""

    key: str
    interval: int


@dataclass(frozen=True)
class Experiment:
    """One task of the comparison, declared. Tuned values and search sets live with the optimizers."""

    name: str
    title: str
    #: The table of the paper, such as "III"; empty where it is not of the paper.
    table: str
    #: Data sets it reads, as ``aida data`` names them.
    data: tuple[str, ...]
    #: Model, data and measure on a device; called when a run starts, not before.
    task: Callable[[TaskContext], Task]
    parameters: int
    epochs: int
    batch: int
    schedule: Schedule
    #: By variant; the first is the default.
    metrics: Mapping[str, Metric]
    #: What the paper reports, by method (:attr:`RunSpec.method`).
    paper: Mapping[str, PaperResult] = field(default_factory=lambda: MappingProxyType({}))
    #: The variant that those figures compare with; empty for the default.
    paper_variant: str = ""
    #: Variants in which SGD gives way to ASGD; the paper's figure for SGD compares with these too.
    switches: Mapping[str, Switch] = field(default_factory=lambda: MappingProxyType({}))
    adjustments: tuple[Adjustment, ...] = ()
    #: Data sets of the variants that read others.
    variant_data: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    #: Whether compiling the model pays on a GPU: it costs most of a minute at the start.
    compiled: bool = False
    #: Whether several processes that torchrun started can train it together.
    distributed: bool = False
    #: Steps between two stepsize measurements when asked for without a number.
    probe_every: int = 391
    #: Parts of the protocol a reader must know of: traps of the public code, readings where the paper is silent.
    notes: str = ""

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.metrics)

    def paper_results(self, variant: str) -> Mapping[str, PaperResult]:
        """The paper's figures that runs of a variant compare with."""
        if variant == (self.paper_variant or self.variants[0]):
            return self.paper
        return {method: figure for method, figure in self.paper.items() if method == "sgd" and variant in self.switches}

    def reads(self, variant: str) -> tuple[str, ...]:
        """The data sets of a variant."""
        return self.variant_data.get(variant, self.data)

    def tuned(self, optimizer: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The optimizer's values for this experiment: defaults, tuned values, adjustments, then ``given``."""
        entry = find(optimizer)
        given = given or {}
        values = {**entry.defaults, **entry.tuned.get(self.name, {})}
        for each in self.adjustments:
            seen = {**values, **given}
            if each.optimizer == entry.name and all(seen.get(key) == value for key, value in each.where.items()):
                values.update(each.values)
        return {**values, **given}

    def untuned(self, optimizer: str, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a run's values that are not the tuned ones."""
        # the number of projections is in the method's name, and tuned values depend on it
        named = {name: value for name, value in hyper.items() if name == "projections"}
        tuned = _as_json(self.tuned(optimizer, named))
        return {name: value for name, value in hyper.items() if name not in tuned or tuned[name] != value}

    def searched(self, optimizer: str) -> Mapping[str, tuple[Any, ...]]:
        """The sets that the paper searched for this optimizer, by hyper-parameter."""
        return find(optimizer).searched.get(self.name, {})

    def not_in_paper(self, optimizer: str, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a run's values that the paper neither fixes nor searched; none where it is silent altogether."""
        searched = self.searched(optimizer)
        if not searched and self.name not in find(optimizer).tuned:
            return {}
        fixed = self.untuned(optimizer, {name: value for name, value in hyper.items() if name not in searched})
        sets = _as_json(dict(searched))
        return {**fixed, **{name: value for name, value in hyper.items() if name in sets and value not in sets[name]}}


@dataclass(frozen=True)
class RunSpec:
    """All that decides a run's numbers on a given machine."""

    experiment: str
    #: A name of the catalog, or ``module:Class``.
    optimizer: str
    #: Every hyper-parameter, resolved.
    hyper: Mapping[str, Any]
    seed: int
    epochs: int
    batch: int
    precision: Precision
    #: Which form of the protocol, where there are several.
    variant: str = "default"
    #: Whether the model is compiled: other kernels, other roundings.
    compiled: bool = False
    #: Only kernels that give the same bits again; on a CPU all do.
    deterministic: bool = False
    #: Steps between two stepsize measurements; 0 for none.
    probe_every: int = 0
    #: At most so many batches an epoch, and as many in an evaluation; None for all. For trials, not for tables.
    limit: int | None = None
    #: Steps over which the experiment's schedule is reached in a straight line; 0 for the schedule as declared.
    warmup: int = 0

    def __post_init__(self) -> None:
        # as JSON would give it back, so that a spec read from its file is equal to the one written
        hyper = _as_json(dict(self.hyper))
        if self.optimizer == "aida":  # the meaning of the runs that were made when this was the default
            hyper.setdefault("decoupled_weight_decay", False)
        object.__setattr__(self, "hyper", MappingProxyType(hyper))

    @property
    def method(self) -> str:
        """What a table calls it: the optimizer's name, with the number of projections for Aida."""
        return f"aida-k{self.hyper['projections']}" if self.optimizer == "aida" else self.optimizer

    @property
    def key(self) -> str:
        """The hash that names the run's folder."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        content = {"format": FORMAT, **_fields_of(self), "hyper": dict(self.hyper)}
        # what came later, or was not said, is left out: runs made before keep their names
        if not self.warmup:
            del content["warmup"]
        if self.optimizer == "aida" and not self.hyper["decoupled_weight_decay"]:
            del content["hyper"]["decoupled_weight_decay"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunSpec:
        """The spec a file holds; ValueError where it is none."""
        known = {each.name for each in fields(cls)}
        given = {"warmup": 0, **{key: value for key, value in content.items() if key != "format"}}
        if content.get("format") != FORMAT or set(given) != known:
            odd = sorted(set(given) ^ known)
            raise ValueError(
                f"no spec of format {FORMAT}: format {content.get('format')!r}"
                + (f", fields missing or unknown: {', '.join(odd)}" if odd else "")
            )
        return cls(**given)


def _as_json(value: Any) -> Any:
    """As a file would give it back: lists for tuples."""
    return json.loads(json.dumps(value))


def _fields_of(spec: RunSpec) -> dict[str, Any]:
    return {each.name: getattr(spec, each.name) for each in fields(spec)}


def optimizer_values(experiment: Experiment, optimizer: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The optimizer's settled name, and its hyper-parameters for this experiment with ``given`` over them."""
    if ":" in optimizer:
        import_optimizer(optimizer)
        return optimizer, dict(given)
    entry: Entry = find(optimizer)
    return entry.name, experiment.tuned(entry.name, given)
