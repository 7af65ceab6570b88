"""Everything a report shows, as values: the paper's tables, other experiments, shortened and changed runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aida_lab.report.collect import Collection
from aida_lab.report.columns import Column, column
from aida_lab.report.groups import Configuration, Setup, configurations
from aida_lab.report.naming import ordered
from aida_lab.spec import Experiment, Metric

#: What the paper's tables are about, in their order.
_TITLES = {
    "I": "Transformer on Multi30k",
    "II": "LSTMs on Penn Treebank",
    "III": "VGG11 and ResNet34 on CIFAR-10 and CIFAR-100",
    "IV": "WGAN-GP on CIFAR-10",
    "V": "ResNet18 on ImageNet",
}


@dataclass(frozen=True)
class Table:
    """A group of columns."""

    name: str  #: for a file name and a link
    title: str
    columns: tuple[Column, ...]
    short: str  #: for the navigation bar
    missing: tuple[tuple[str, str], ...] = ()  #: title and name of the experiments that have no runs

    @property
    def runs(self) -> int:
        return sum(len(each.runs) for each in self.columns)


@dataclass(frozen=True)
class Results:
    """The runs of all folders, arranged in tables."""

    collection: Collection
    reference: str
    paper: tuple[Table, ...]  #: the paper's tables by number, with and without runs
    others: Table  #: experiments that are not in the paper
    shortened: Table  #: runs with fewer epochs or batches, another batch size or a warm-up

    @property
    def tables(self) -> tuple[Table, ...]:
        """Those with runs."""
        return tuple(table for table in (*self.paper, self.others, self.shortened) if table.columns)

    @property
    def columns(self) -> list[Column]:
        return [each for table in self.tables for each in table.columns]

    @property
    def comparable(self) -> list[Column]:
        """Columns whose runs are their experiment as declared."""
        return [each for each in self.columns if not each.departures]

    @property
    def methods(self) -> list[str]:
        return ordered(cell.method for each in self.columns for cell in each.cells)

    @property
    def names(self) -> list[str]:
        """The methods, and those of their sweeps that have names of their own: all that charts show."""
        return ordered([*self.methods, *(each.name for column in self.columns for each in column.sweeps)])

    @property
    def measured(self) -> list[str]:
        """Methods that have runs, finished or not."""
        return ordered(run.spec.method for run in self.collection.runs)


def arrange(collection: Collection, experiments: Mapping[str, Experiment], reference: str) -> Results:
    """Arrange the runs in columns, and the columns in tables."""
    groups: dict[Setup, list[Configuration]] = {}
    for each in configurations(collection.runs):
        groups.setdefault(each.setup, []).append(each)
    columns: dict[str, list[Column]] = {}
    for setup in sorted(groups):
        experiment = experiments.get(setup.experiment)
        alike = (setup.experiment, setup.variant)
        beside = {other: found for other, found in groups.items() if (other.experiment, other.variant) == alike}
        metric = _metric(experiment, setup, groups[setup])
        elsewhere = _tried_elsewhere(setup, beside, experiment)
        distinction = _distinction(setup, beside, experiment)
        found = column(experiment, metric, groups[setup], reference, elsewhere, distinction)
        columns.setdefault(setup.experiment, []).append(found)
    every = [each for found in columns.values() for each in found]
    departed = tuple(each for each in every if each.departures)
    others = tuple(
        each for each in every if not each.departures and not (each.experiment and each.experiment.table)
    )  # fmt: skip
    return Results(
        collection=collection,
        reference=reference,
        paper=_paper_tables(experiments, columns),
        others=Table("others", "Other experiments", others, "Other experiments"),
        shortened=Table("shortened", "Shortened and changed runs", departed, "Shortened"),
    )


def _paper_tables(experiments: Mapping[str, Experiment], columns: Mapping[str, Sequence[Column]]) -> tuple[Table, ...]:
    tables: dict[str, list[Column]] = {}
    missing: dict[str, list[tuple[str, str]]] = {}
    for name, experiment in experiments.items():
        if not experiment.table:
            continue
        paper = experiment.paper_variant
        order = [paper, *experiment.variants, *(each.setup.variant for each in columns.get(name, ()))]
        whole = [each for each in columns.get(name, ()) if not each.departures]
        tables.setdefault(experiment.table, []).extend(sorted(whole, key=lambda each: order.index(each.setup.variant)))
        if not any(each.setup.variant == paper for each in whole):
            title = experiment.title + ("" if paper == experiment.variants[0] else f", {paper}")
            missing.setdefault(experiment.table, []).append((title, name))
    numbers = [*(number for number in _TITLES if number in tables), *sorted(tables.keys() - _TITLES.keys())]
    found = []
    for number in numbers:
        title = _TITLES.get(number) or ", ".join(dict.fromkeys(each.title for each in tables[number]))
        about, short = f"Table {number}: {title}", f"Table {number}"
        found.append(Table(f"table-{number}", about, tuple(tables[number]), short, tuple(missing.get(number, ()))))
    return tuple(found)


def _metric(experiment: Experiment | None, setup: Setup, found: Sequence[Configuration]) -> Metric:
    """As declared; for an experiment that is not known here, as the runs' results have it."""
    if experiment is not None and setup.variant in experiment.metrics:
        return experiment.metrics[setup.variant]
    for run in (run for each in found for run in each.runs if run.metric):
        return Metric(run.metric, run.metric.replace("_", " "), "lower" if run.better == "lower" else "higher")
    return Metric("", "not known", "higher")


def _tried_elsewhere(
    setup: Setup, beside: Mapping[Setup, Sequence[Configuration]], experiment: Experiment | None
) -> dict[str, int]:
    """Configurations of each method in shortened columns of the same experiment and variant."""
    found: dict[str, set[str]] = {}
    for other, members in beside.items():
        if other != setup and other.departures(experiment):
            for each in members:
                if each.tried:
                    found.setdefault(each.method, set()).add(json.dumps(dict(each.hyper), sort_keys=True))
    return {method: len(tried) for method, tried in found.items()}


def _distinction(setup: Setup, beside: Iterable[Setup], experiment: Experiment | None) -> str:
    """What this column's title adds to the experiment's title."""
    departures = setup.departures(experiment)
    default = experiment.variants[0] if experiment else "default"
    words = [] if setup.variant == default else [setup.variant]
    alike = [other for other in beside if other.departures(experiment) == departures]
    if len({other.manner for other in alike}) > 1:
        words.append(setup.manner)
    if experiment is None and len({(other.epochs, other.batch) for other in alike}) > 1:
        words.append(f"{setup.epochs} epochs, batch {setup.batch}")
    return ", ".join([*words, *departures])
