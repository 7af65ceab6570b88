"""A column of a table: every method of one experiment under one setup, ours beside the paper's.

A method's number is the mean of one configuration. Its p-value says whether it differs from the reference method,
adjusted for all methods of the column. A method leads a column only if it differs from every other one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from aida_lab.report import words
from aida_lab.report.collect import Run
from aida_lab.report.groups import Configuration, Measure, Setup, ranked
from aida_lab.report.naming import file_name, ordered
from aida_lab.report.statistics import Comparison, MeanStd, against_control, against_published, mean_std
from aida_lab.report.sweeps import Sweep, sweeps, without_tuning_runs
from aida_lab.spec import Experiment, Metric, PaperResult

MEASURES: tuple[Measure, Measure] = ("best", "last")

NOT_THE_PAPERS = "not the paper's values"


@dataclass(frozen=True)
class Cell:
    """One method in one column."""

    method: str
    chosen: Configuration | None  #: the configuration in the method's row; None if it has no finished run
    configurations: tuple[Configuration, ...]  #: all of this column, the chosen one first
    elsewhere: int  #: configurations tried in shortened runs of the same experiment, which may have selected this one
    paper: PaperResult | None
    #: The configuration with the best mean, if it is not the chosen one: fewer seeds, or values the paper did not try.
    better: Configuration | None = None
    against_paper: Comparison | None = None
    #: By measure; empty for the reference itself and if either side has no run.
    against_reference: Mapping[Measure, Comparison] = field(default_factory=dict)
    #: The better configuration against the reference, at the best epoch.
    better_against_reference: Comparison | None = None
    #: Measures at which it is the best of the column and significantly better than every other method.
    leads: frozenset[Measure] = frozenset()

    def mean_std(self, measure: Measure) -> MeanStd | None:
        return self.chosen.mean_std(measure) if self.chosen else None

    def best_run(self, metric: Metric) -> tuple[float, Configuration]:
        """The best number of all seeds and configurations, and its configuration; for a method with a finished run.

        If the method's row has the paper's values, only configurations with the paper's values count.
        """
        assert self.chosen is not None
        own = bool(self.chosen.untried)
        candidates = [each for each in self.configurations if own or not each.untried]
        found = [(run.best, each) for each in candidates for run in each.counted if run.best is not None]
        return min(found, key=lambda one: metric.sort_key(one[0]))

    @property
    def diverged(self) -> int:
        return sum(each.diverged for each in self.configurations)

    @property
    def open(self) -> int:
        return sum(each.open for each in self.configurations)

    @property
    def tried(self) -> int:
        """Configurations of this column with a finished or diverged run."""
        return sum(each.tried for each in self.configurations)


@dataclass(frozen=True)
class Column:
    """One experiment under one setup."""

    name: str
    experiment: Experiment | None
    setup: Setup
    metric: Metric
    reference: str
    cells: tuple[Cell, ...]
    departures: tuple[str, ...] = ()  #: how its runs differ from the experiment as declared
    distinction: str = ""  #: what distinguishes it from the experiment's other columns; empty if it is the only one

    @property
    def digits(self) -> int:
        """Digits behind the point that suit its numbers."""
        means = [found.mean for cell in self.cells if (found := cell.mean_std("best"))]
        return words.decimals(means or [cell.paper.mean for cell in self.cells if cell.paper])

    @property
    def finished(self) -> bool:
        """Whether some method has a finished run."""
        return any(cell.chosen for cell in self.cells)

    @property
    def timed(self) -> bool:
        """Whether it is known what an epoch of some method takes."""
        return any(cell.chosen is not None and cell.chosen.seconds() is not None for cell in self.cells)

    @property
    def id(self) -> str:
        """Fit for a file name and a link."""
        known = self.setup
        default = self.experiment.variants[0] if self.experiment else "default"
        parts = [self.name, *([known.variant] if known.variant != default else [])]
        parts += known.manner.replace(",", "").split()
        if self.departures or self.experiment is None:
            parts += [f"{known.epochs}-epochs", f"batch-{known.batch}"]
            parts += [f"limit-{known.limit}"] if known.limit else []
            parts += [f"warmup-{known.warmup}"] if known.warmup else []
        return file_name("-".join(parts))

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

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """Learning-rate sweeps of its methods; none unless there are two to compare."""
        found = [each for cell in self.cells for each in sweeps(cell.configurations, self.metric)]
        return found if len(found) > 1 else []

    @property
    def counted(self) -> list[Run]:
        """Runs behind the numbers of its table."""
        return [run for cell in self.cells if cell.chosen for run in cell.chosen.counted]

    @property
    def mixed(self) -> str:
        """How many commits and torch versions its numbers come from, in words; empty if they come from one of each."""
        return mixture(self.counted)

    def gain(self, found: Comparison) -> float:
        """A difference of the metric, positive if the first method is better."""
        return -self.metric.sort_key(found.difference)

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
    paper: Mapping[str, PaperResult] = {}
    if experiment is not None and not departures:  # a shortened run must not be held against the paper's whole one
        paper = experiment.paper_results(setup.variant)
        groups = {method: [] for method in paper or experiment.paper}
    for each in found:
        compared = experiment if each.method in paper else None
        untried = compared.not_in_paper(each.spec.optimizer, each.hyper) if compared else {}
        groups.setdefault(each.method, []).append(replace(each, untried=untried))
    cells = []
    for method in ordered(groups):
        ranking = ranked(without_tuning_runs(groups[method], metric), metric)
        chosen = ranking[0] if ranking and ranking[0].counted else None
        better = _better(ranking, metric)
        cells.append(Cell(method, chosen, tuple(ranking), elsewhere.get(method, 0), paper.get(method), better))
    tested = _tested(cells, metric, reference)
    return Column(setup.experiment, experiment, setup, metric, reference, tested, departures, distinction)


def _better(ranking: Sequence[Configuration], metric: Metric) -> Configuration | None:
    """The configuration without diverged seeds that has the best mean; None if that is the first one."""
    best = None
    held = ranking[0].mean_std("best") if ranking else None
    for each in ranking[1:]:
        mean = each.mean_std("best")
        if mean and held and not each.diverged and not each.outdone and metric.improves(mean.mean, held.mean):
            best, held = each, mean
    return best


def origins(runs: Iterable[Run]) -> tuple[Counter[str], Counter[str]]:
    """The commits and the torch versions behind runs, each with its number of runs."""
    runs = list(runs)
    return Counter(each for run in runs for each in run.commits), Counter(each for run in runs for each in run.torch)


def mixture(runs: Iterable[Run]) -> str:
    """``2 commits, 3 torch versions``; empty if all runs have the same ones."""
    found = zip(origins(runs), ("commits", "torch versions"), strict=True)
    return ", ".join(f"{len(names)} {kind}" for names, kind in found if len(names) > 1)


def _tested(cells: Sequence[Cell], metric: Metric, reference: str) -> tuple[Cell, ...]:
    """The cells with their tests, which know each configuration by its id."""
    chosen = [cell.chosen for cell in cells if cell.chosen]
    control = next((each.id for each in chosen if each.method == reference), "")
    survivors = {each.id for each in chosen if each.diverged}
    against: dict[Measure, dict[str, Comparison]] = {}
    leaders: dict[Measure, str | None] = {}
    for measure in MEASURES:
        # a better configuration of a method is tested in the same family
        better = [cell.better for cell in cells if cell.better and cell.method != reference and measure == "best"]
        values = {each.id: each.values(measure) for each in chosen}
        against[measure] = _family(control, {**values, **{each.id: each.values(measure) for each in better}}, survivors)
        leaders[measure] = _leader(values, metric, survivors, control, against[measure])

    def tested(cell: Cell) -> Cell:
        own, better = (each.id if each else "" for each in (cell.chosen, cell.better))
        return replace(
            cell,
            against_paper=_against_paper(cell, metric),
            against_reference={measure: found[own] for measure, found in against.items() if own in found},
            better_against_reference=against["best"].get(better),
            leads=frozenset(measure for measure, leader in leaders.items() if leader == own),
        )

    return tuple(map(tested, cells))


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
    # which seeds are left depends on what is compared
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
    first = min(means, key=lambda method: metric.sort_key(means[method]))
    if first in survivors:
        return None
    tests = family if first == reference else _family(first, values, survivors)
    rivals = [each for method, each in tests.items() if method not in survivors]
    return first if rivals and all(each.significant for each in rivals) else None


def _against_paper(cell: Cell, metric: Metric) -> Comparison | None:
    ours = cell.mean_std("best")
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
