"""How the reference method stands on each task: a sentence, a table, and a dot plot of the differences.

A rival is a method's row of the table. A better configuration of the method, with fewer seeds or with values that the
paper did not try, is a rival of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from aida_lab.report import words
from aida_lab.report.columns import Cell, Column
from aida_lab.report.formats import Field, Grid, Head, absent, grid
from aida_lab.report.groups import Configuration
from aida_lab.report.naming import title
from aida_lab.report.results import Results
from aida_lab.report.statistics import LEVEL, Comparison
from aida_lab.report.tables import NO_RUNS, mean_and_seeds, paper_field

#: Of the reference; "ahead" and "behind" are the rival's.
Standing = Literal["better than", "no significant difference", "worse than", "ahead, not tested", "behind, not tested"]
STANDINGS: tuple[Standing, ...] = get_args(Standing)


@dataclass(frozen=True)
class Rival:
    name: str
    configuration: Configuration
    comparison: Comparison
    standing: Standing


@dataclass(frozen=True)
class Dot:
    """One row of the dot plot. Places are percentages of the width; right of ``Dots.zero`` is better."""

    method: str
    name: str
    text: str
    place: float
    ends: tuple[float, ...] | None  #: ends of the simultaneous 95 % interval; None if there is no test
    significant: bool
    opens: str


@dataclass(frozen=True)
class Dots:
    rows: tuple[Dot, ...]
    zero: float


def rivals(column: Column) -> list[Rival]:
    """Every method but the reference, the best first."""
    found = []
    for cell in column.cells:
        tests = ((cell.chosen, cell.against_reference.get("best")), (cell.better, cell.better_against_reference))
        for each, test in tests:
            if each and test:
                found.append(Rival(_name(each, cell), each, test, _standing(test, column)))
    return sorted(found, key=lambda rival: (-column.gain(rival.comparison), rival.name))


def glance(results: Results) -> Grid:
    """One row per task: the reference against the paper and against the others."""
    reference = title(results.reference)
    notes: dict[Standing, str] = {
        "better than": f"methods that {reference} beats significantly: Dunnett's test, p < {LEVEL}",
        "no significant difference": "methods that were tested, with a larger p-value",
        "worse than": f"methods that beat {reference} significantly",
        "ahead, not tested": f"better than {reference}, but not tested; * marks values that the paper did not try",
        "behind, not tested": f"worse than {reference}, but not tested",
    }

    def task(column: Column) -> Field:
        return Field(column.title, note=f"{column.metric.title}, {column.metric.better} is better")

    heads = [
        Head("task", task, numeric=False),
        Head(reference, _reference_mean),
        Head("paper", _reference_paper),
        *(Head(each, partial(_rivals_field, standing=each), notes[each], numeric=False) for each in STANDINGS),
    ]
    return grid("glance", f"{reference} on every task", heads, results.comparable)


def sentence(column: Column) -> str:
    """Who is ahead, by how much and how sure that is."""
    reference, digits = title(column.reference), column.digits
    own = column.cell(column.reference)
    mean = own.mean_std("best") if own else None
    if own is None or mean is None:
        return f"No comparison: {reference} has no finished run here."
    found = rivals(column)
    number = f"{words.spread(mean, digits)}, n={mean.n}"
    if not found:
        return f"Only {reference} has finished runs ({number})."
    first = found[0]
    if column.gain(first.comparison) <= 0:
        said = f"{reference} is ahead ({number})"
    else:
        said = f"{first.name} is ahead of {reference} by {_lead(first.comparison, digits)}"
    tested = [rival for rival in found if rival.comparison.p is not None]
    if not tested:
        return f"{said}; no difference could be tested."
    if not any(rival.comparison.significant for rival in tested):
        return f"{said}; no difference is significant."
    parts = [f"significantly better than {_names(found, 'better than')}"]
    parts += [f"significantly worse than {_names(found, 'worse than')}"]
    parts += [f"not significantly different from {_names(found, 'no significant difference')}"]
    return f"{said}; {reference} is {', '.join(part for part in parts if not part.endswith(' '))}."


def dots(column: Column) -> Dots | None:
    """The differences to the reference with their intervals; None if there is nothing to compare."""
    found = rivals(column)
    own = column.cell(column.reference)
    if not found or own is None or own.chosen is None:
        return None
    sign = 1 if column.metric.better == "higher" else -1
    values = [0.0]
    for rival in found:
        values += [sign * each for each in (rival.comparison.difference, *(rival.comparison.interval or ()))]
    low, high = min(values), max(values)
    room = 0.03 * (high - low) or 1.0
    low, high = low - room, high + room

    def place(value: float) -> float:
        return round(100 * (sign * value - low) / (high - low), 2)

    def dot(rival: Rival) -> Dot:
        test, each = rival.comparison, rival.configuration
        ends = tuple(sorted(map(place, test.interval))) if test.interval else None
        size = words.signed(test.difference, column.digits)
        text = f"{size} ({words.interval(test, column.digits) or test.reason})"
        return Dot(each.method, rival.name, text, place(test.difference), ends, test.significant, each.id)

    return Dots(tuple(map(dot, found)), place(0.0))


def _name(each: Configuration, cell: Cell) -> str:
    """The method's title; with the values that the paper did not try, or that are not those of the method's row."""
    values = each.untried
    if not values and cell.chosen and each is not cell.chosen:
        values = {name: value for name, value in each.hyper.items() if cell.chosen.hyper.get(name) != value}
    with_values = f" with {words.settings(values)}" if values else ""
    return f"{title(cell.method)}{with_values}{'*' if each.untried else ''}"


def _standing(test: Comparison, column: Column) -> Standing:
    ahead = column.gain(test) > 0
    if test.p is None:
        return "ahead, not tested" if ahead else "behind, not tested"
    if not test.significant:
        return "no significant difference"
    return "worse than" if ahead else "better than"


def _lead(found: Comparison, digits: int) -> str:
    """``1.02 ± 0.80 (significant)``: the difference, half its interval, and how sure it is."""
    size = words.number(abs(found.difference), digits)
    if found.p is None or found.interval is None:
        return f"{size} ({found.reason})"
    half = (found.interval[1] - found.interval[0]) / 2
    return f"{size} ± {half:.{digits}f} ({'significant' if found.significant else 'not significant'})"


def _names(found: Sequence[Rival], standing: Standing) -> str:
    names = [rival.name for rival in found if rival.standing == standing]
    if len(names) > 3 and len(names) < len(found):
        return f"{len(names)} of {len(found)} rivals"
    if len(names) == len(found) > 1:
        return f"all {len(found)} rivals"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _reference_mean(column: Column) -> Field:
    own = column.cell(column.reference)
    return mean_and_seeds(own, column) if own else absent(NO_RUNS)


def _reference_paper(column: Column) -> Field:
    own = column.cell(column.reference)
    if own and own.paper:
        return paper_field(own, column.digits)
    published = column.experiment is not None and column.reference in column.experiment.paper
    return absent("of another variant" if published else "not in the paper")


def _rivals_field(column: Column, standing: Standing) -> Field:
    """How many of the other methods stand like that, and which."""
    found = [rival.name for rival in rivals(column) if rival.standing == standing]
    methods = len({cell.method for cell in column.cells if cell.chosen} - {column.reference})
    if not found:
        return Field("none", 0, faint=True)
    if len(found) == methods > 1:
        return Field(f"all {methods}", methods)
    return Field(f"{len(found)} of {methods}", len(found), note=", ".join(found))
