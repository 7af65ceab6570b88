"""A column of a table: every method of one experiment under one setup, ours beside the paper's.

A method's number is the mean of its best configuration. Its p-value says whether it differs from the reference
method, adjusted for all methods of the column. A method leads a column only if it differs from every other one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aida_lab.report.collect import Run
from aida_lab.report.groups import Configuration, Measure, Setup, ranked
from aida_lab.report.naming import file_name, ordered
from aida_lab.report.statistics import Comparison, MeanStd, against_control, against_published, mean_std
from aida_lab.spec import Experiment, Metric, PaperFigure

MEASURES: tuple[Measure, Measure] = ("best", "last")

#: What is said of a configuration that untried.
NOT_THE_PAPERS = "not the paper's values"


@dataclass(frozen=True)
class Cell:
    """One method in one column."""

    method: str
    #: The configuration that stands for it; None where it has no finished run.
    chosen: Configuration | None
    #: All of this column, the chosen one first.
    configurations: tuple[Configuration, ...]
    #: Configurations of other, shortened columns of the same experiment: it may have been chosen by those.
    elsewhere: int
    paper: PaperFigure | None
    against_paper: Comparison | None = None
    #: By measure; empty for the reference itself and where either side has no run.
    against_reference: Mapping[Measure, Comparison] = field(default_factory=dict)
    #: Measures at which it is the best of the column and significantly better than every other method.
    leads: frozenset[Measure] = frozenset()

    def summary(self, measure: Measure) -> MeanStd | None:
        return self.chosen.summary(measure) if self.chosen else None

    def best_run(self, metric: Metric) -> tuple[float, Configuration]:
        """The best number of all seeds and configurations, and whose it is; for a method with a finished run.

        Where the paper's values stand for the method, of those alone.
        """
        assert self.chosen is not None
        own = bool(self.chosen.untried)
        candidates = [each for each in self.configurations if own or not each.untried]
        found = [(run.best, each) for each in candidates for run in each.counted if run.best is not None]
        return (max if metric.better == "higher" else min)(found, key=lambda one: one[0])

    @property
    def diverged(self) -> int:
        return sum(each.diverged for each in self.configurations)

    @property
    def open(self) -> int:
        return sum(each.open for each in self.configurations)

    @property
    def tried(self) -> int:
        """Configurations of this column with a finished or diverged run."""
        return sum(bool(each.counted or each.diverged) for each in self.configurations)


@dataclass(frozen=True)
class Column:
    """One experiment under one setup; without a setup where it has no runs."""

    name: str
    experiment: Experiment | None
    setup: Setup | None
    metric: Metric
    reference: str
    cells: tuple[Cell, ...]
    #: Where its runs are not the experiment as declared.
    departures: tuple[str, ...] = ()
    #: What tells it from the experiment's other columns; empty where it is the only one.
    distinction: str = ""

    @property
    def timed(self) -> bool:
        """Whether it is known what an epoch of some method takes."""
        return any(cell.chosen is not None and cell.chosen.seconds() is not None for cell in self.cells)

    @property
    def id(self) -> str:
        """Fit for a file name and a link."""
        if self.setup is None:
            return file_name("-".join([self.name, *self.distinction.split()]))
        known = self.setup
        words = [self.name, *self._variant, *known.manner.replace(",", "").split()]
        if self.departures or self.experiment is None:
            words += [f"{known.epochs}-epochs", f"batch-{known.batch}"]
            words += [f"limit-{known.limit}"] if known.limit else []
            words += [f"warmup-{known.warmup}"] if known.warmup else []
        return file_name("-".join(words))

    @property
    def detail(self) -> str:
        """How its runs were computed, in words; empty where there are none."""
        return self.setup.manner if self.setup else ""

    @property
    def _variant(self) -> list[str]:
        """The variant, where it is not the one that goes without saying."""
        default = self.experiment.variants[0] if self.experiment else "default"
        return [self.setup.variant] if self.setup and self.setup.variant != default else []

    @property
    def title(self) -> str:
        title = self.experiment.title if self.experiment else self.name
        return f"{title}, {self.distinction}" if self.distinction else title

    @property
    def configurations(self) -> list[Configuration]:
        return [each for cell in self.cells for each in cell.configurations]

    @property
    def runs(self) -> list[Run]:
        return [run for each in self.configurations for run in each.runs]

    @property
    def counted(self) -> list[Run]:
        """Runs behind the numbers of its table."""
        return [run for cell in self.cells if cell.chosen for run in cell.chosen.counted]

    @property
    def mixed(self) -> str:
        """How many commits and torch versions its numbers come from, in words; empty if they come from one of each."""
        return mixture(self.counted)

    def cell(self, method: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.method == method), None)


def column(
    experiment: Experiment | None, metric: Metric, found: Sequence[Configuration], reference: str,
    elsewhere: Mapping[str, int], distinction: str,
) -> Column:  # fmt: skip
    """The column that these configurations, all of one setup, make."""
    setup = found[0].setup
    departures = setup.departures(experiment)
    groups: dict[str, list[Configuration]] = {}
    paper: Mapping[str, PaperFigure] = {}
    if experiment is not None and not departures:  # a shortened run must not be held against the paper's whole one
        paper = experiment.figures(setup.variant)
        groups = {method: [] for method in paper or experiment.paper}
    for each in found:
        untried = experiment.strays(each.optimizer, each.hyper) if experiment and each.method in paper else {}
        groups.setdefault(each.method, []).append(replace(each, untried=untried))
    cells = []
    for method in ordered(groups):
        ranking = ranked(groups[method], metric)
        chosen = ranking[0] if ranking and ranking[0].counted else None
        cells.append(Cell(method, chosen, tuple(ranking), elsewhere.get(method, 0), paper.get(method)))
    tested = _tested(cells, metric, reference)
    return Column(setup.experiment, experiment, setup, metric, reference, tested, departures, distinction)


def empty_column(experiment: Experiment, reference: str, elsewhere: Mapping[str, int]) -> Column:
    """The paper's figures, where there are no runs to stand beside them."""
    variant = paper_variant(experiment)
    cells = tuple(
        Cell(method, None, (), elsewhere.get(method, 0), experiment.paper[method])
        for method in ordered(experiment.paper)
    )
    distinction = "" if variant == experiment.variants[0] else variant
    metric = experiment.metrics[variant]
    return Column(experiment.name, experiment, None, metric, reference, cells, distinction=distinction)


def mixture(runs: Collection[Run]) -> str:
    """``2 commits, 3 torch versions``; empty if all runs have the same ones."""
    commits = {each for run in runs for each in run.commits}
    versions = {each for run in runs for each in run.torch}
    said = [f"{len(commits)} commits"] if len(commits) > 1 else []
    said += [f"{len(versions)} torch versions"] if len(versions) > 1 else []
    return ", ".join(said)


def paper_variant(experiment: Experiment) -> str:
    """The variant that the paper's figures compare with."""
    return experiment.paper_variant or experiment.variants[0]


def _tested(cells: Sequence[Cell], metric: Metric, reference: str) -> tuple[Cell, ...]:
    against: dict[str, dict[Measure, Comparison]] = {cell.method: {} for cell in cells}
    leaders: dict[Measure, str] = {}
    survivors = {cell.method for cell in cells if cell.chosen and cell.chosen.diverged}
    for measure in MEASURES:
        values = {cell.method: cell.chosen.values(measure) for cell in cells if cell.chosen}
        family = _family(reference, values, survivors)
        for method, comparison in family.items():
            against[method][measure] = comparison
        if leader := _leader(values, metric, survivors, reference, family):
            leaders[measure] = leader
    return tuple(
        replace(
            cell,
            against_paper=_against_paper(cell, metric),
            against_reference=against[cell.method],
            leads=frozenset(measure for measure, leader in leaders.items() if leader == cell.method),
        )
        for cell in cells
    )


def _family(control: str, values: Mapping[str, Sequence[float]], survivors: Collection[str]) -> dict[str, Comparison]:
    """Every other method against the control; those with diverged seeds are not tested, nor in the pooled variance."""
    if control not in values:
        return {}
    whole = {method: found for method, found in values.items() if method not in survivors}
    tested = against_control(control, whole) if control in whole else {}
    mean = mean_std(values[control]).mean
    return {
        method: tested.get(method) or _untested(mean_std(found).mean - mean)
        for method, found in values.items()
        if method != control
    }


def _untested(difference: float) -> Comparison:
    # the seeds that are left were selected by the very thing that is compared
    return Comparison(difference, reason="seeds diverged, no test")


def _leader(
    values: Mapping[str, Sequence[float]], metric: Metric, survivors: Collection[str],
    reference: str, family: Mapping[str, Comparison],
) -> str | None:  # fmt: skip
    """The method with the best mean, if it differs significantly from every other one; None if it is alone.

    Dunnett's test with the best method as the control is Hsu's comparison with the best, for which a one-sided test
    is enough: choosing the control by its mean needs no further adjustment. A method with diverged seeds leads
    nothing, and is no rival to one without whose mean is better. ``family`` are the tests against the reference.
    """
    if not values:
        return None
    means = {method: mean_std(found).mean for method, found in values.items()}
    first = (max if metric.better == "higher" else min)(means, key=lambda method: means[method])
    if first in survivors:
        return None
    tests = family if first == reference else _family(first, values, survivors)
    rivals = [each for method, each in tests.items() if method not in survivors]
    return first if rivals and all(each.significant for each in rivals) else None


def _against_paper(cell: Cell, metric: Metric) -> Comparison | None:
    ours = cell.summary("best")
    if ours is None or cell.chosen is None or cell.paper is None:
        return None
    difference = (cell.best_run(metric)[0] if cell.paper.best else ours.mean) - cell.paper.mean
    if cell.chosen.untried:
        return Comparison(difference, reason=f"{NOT_THE_PAPERS}, no test")
    if cell.paper.best:
        return Comparison(difference, reason="best of all runs, no test")
    if cell.chosen.diverged:
        return _untested(difference)
    return against_published(ours, cell.paper.mean, cell.paper.std)
