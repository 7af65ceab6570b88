"""How the reference method stands on a task: a sentence, groups of rivals, and a dot plot of the differences.

A rival is a method's row of the table. A better configuration of the method, with fewer seeds or with values that the
paper did not try, is a rival of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aida_lab.report import words
from aida_lab.report.columns import Column
from aida_lab.report.groups import Configuration
from aida_lab.report.naming import title
from aida_lab.report.statistics import Comparison

Standing = Literal[
    "better than", "no significant difference", "worse than", "ahead, not tested", "behind, not tested"
]  #: of the reference; "ahead" and "behind" are the rival's
STANDINGS: tuple[Standing, ...] = (
    "better than", "no significant difference", "worse than", "ahead, not tested", "behind, not tested",
)  # fmt: skip


@dataclass(frozen=True)
class Rival:
    method: str
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
    #: Ends of the simultaneous 95 % interval; None if there is no test.
    ends: tuple[float, float] | None
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
        tested = cell.against_reference.get("best")
        if cell.chosen and tested:
            name = title(cell.method) + (f" with {words.settings(cell.chosen.untried)}*" if cell.chosen.untried else "")
            found.append(_rival(cell.method, name, cell.chosen, tested, column))
        if cell.better and cell.better_against_reference:
            differs = cell.better.untried or _differs(cell.better, cell.chosen)
            mark = "*" if cell.better.untried else ""
            name = f"{title(cell.method)} with {words.settings(differs)}{mark}"
            found.append(_rival(cell.method, name, cell.better, cell.better_against_reference, column))
    sign = -1 if column.metric.better == "higher" else 1
    return sorted(found, key=lambda rival: (sign * rival.comparison.difference, rival.name))


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
    if _gain(first.comparison.difference, column) <= 0:
        said = f"{reference} is ahead ({number})"
    else:
        said = f"{first.name} is ahead of {reference} by {_size(first.comparison, digits)} ({_sure(first.comparison)})"
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

    rows = []
    for rival in found:
        comparison = rival.comparison
        ends = comparison.interval and tuple(sorted(map(place, comparison.interval)))
        text = words.signed(comparison.difference, column.digits)
        if comparison.interval:
            text += " ({} to {})".format(*(words.signed(end, column.digits) for end in comparison.interval))
        else:
            text += f" ({comparison.reason})"
        rows.append(
            Dot(
                rival.method, rival.name, text, place(comparison.difference), (ends[0], ends[1]) if ends else None,
                comparison.significant, rival.configuration.id,
            )
        )  # fmt: skip
    return Dots(tuple(rows), place(0.0))


def _rival(method: str, name: str, each: Configuration, comparison: Comparison, column: Column) -> Rival:
    ahead = _gain(comparison.difference, column) > 0
    standing: Standing
    if comparison.p is None:
        standing = "ahead, not tested" if ahead else "behind, not tested"
    elif not comparison.significant:
        standing = "no significant difference"
    else:
        standing = "worse than" if ahead else "better than"
    return Rival(method, name, each, comparison, standing)


def _differs(one: Configuration, other: Configuration | None) -> dict[str, object]:
    known = dict(other.hyper) if other else {}
    return {name: value for name, value in one.hyper.items() if known.get(name) != value}


def _gain(difference: float, column: Column) -> float:
    return difference if column.metric.better == "higher" else -difference


def _size(found: Comparison, digits: int) -> str:
    """``1.02 ± 0.80``: the difference and half its interval."""
    size = words.number(abs(found.difference), digits)
    return f"{size} ± {(found.interval[1] - found.interval[0]) / 2:.{digits}f}" if found.interval else size


def _sure(found: Comparison) -> str:
    if found.p is None:
        return found.reason
    return "significant" if found.significant else "not significant"


def _names(found: Sequence[Rival], standing: Standing) -> str:
    names = [rival.name for rival in found if rival.standing == standing]
    if len(names) > 3 and len(names) < len(found):
        return f"{len(names)} of {len(found)} rivals"
    if len(names) == len(found) > 1:
        return f"all {len(found)} rivals"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
