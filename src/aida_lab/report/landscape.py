"""How a method's number depends on a hyper-parameter such as eps or lr."""

from __future__ import annotations

from dataclasses import dataclass

from aida_lab.report.columns import Cell, Column
from aida_lab.report.groups import Configuration
from aida_lab.runs.checks import finite

#: Shown before all others.
_FIRST = ("eps", "lr")


@dataclass(frozen=True)
class Landscape:
    """One hyper-parameter of one column: the configurations of each method that varies it, by its value."""

    column: Column
    setting: str
    #: Method, then (value, configuration), ascending.
    points: dict[str, tuple[tuple[float, Configuration], ...]]

    def ridge(self, method: str) -> list[tuple[float, Configuration]]:
        """At each value, the configuration with the best mean."""
        best: dict[float, Configuration] = {}
        for value, each in self.points[method]:
            mean, known = each.mean_std("best"), best.get(value)
            held = known.mean_std("best") if known else None
            if mean and (held is None or self.column.metric.improves(mean.mean, held.mean)):
                best[value] = each
        return sorted(best.items())


def landscapes(column: Column) -> list[Landscape]:
    """One per hyper-parameter that varies between configurations of a method, eps and lr first."""
    found: dict[str, dict[str, tuple[tuple[float, Configuration], ...]]] = {}
    for cell in column.cells:
        for setting, points in _searched(cell).items():
            found.setdefault(setting, {})[cell.method] = points
    order = sorted(found, key=lambda setting: (_FIRST.index(setting) if setting in _FIRST else len(_FIRST), setting))
    return [Landscape(column, setting, found[setting]) for setting in order]


def _searched(cell: Cell) -> dict[str, tuple[tuple[float, Configuration], ...]]:
    measured = [each for each in cell.configurations if each.counted]
    found = {}
    for setting in dict.fromkeys(name for each in measured for name in each.hyper):
        points = [(_positive(each.hyper.get(setting)), each) for each in measured]
        numbers = [(value, each) for value, each in points if value is not None]
        if len({value for value, _ in numbers}) > 1 and len(numbers) == len(points):
            found[setting] = tuple(sorted(numbers, key=lambda point: (point[0], point[1].id)))
    return found


def _positive(value: object) -> float | None:
    """The value if a log axis can show it; None for switches and texts."""
    number = finite(value)
    return number if number is not None and number > 0 else None
