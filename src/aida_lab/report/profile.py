"""A performance profile over all tasks, after Dolan and Moré: how often each method is how close to the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aida_lab.report.columns import Column
from aida_lab.report.naming import ordered
from aida_lab.spec import Metric

#: What the page says.
DEFINITION = (
    "For each method, the share of tasks (shortened runs left out) on which its mean cost is within the given gap of "
    "the lowest mean cost of any method. The cost is 100 − accuracy, or the perplexity, distance or loss itself, at "
    "the best epoch of the best known configuration, also one with fewer seeds or with values the paper did not try. "
    "The gap is cost over lowest cost, minus one. A task on which all runs of a method diverged counts against it. "
    "Methods that were not run on all tasks are left out."
)


@dataclass(frozen=True)
class Profile:
    """The gaps of each method on the tasks where it has a number, ascending."""

    tasks: tuple[str, ...]
    gaps: dict[str, tuple[float, ...]]

    def share(self, method: str, gap: float) -> float:
        """Of all tasks, those on which the method is within the gap."""
        return sum(each <= gap for each in self.gaps[method]) / len(self.tasks)


def profile(columns: Sequence[Column]) -> Profile | None:
    """The profile over the columns in which at least two methods have a number.

    None if there are fewer than two such columns, or fewer than two methods that were run on all of them.
    """
    tasks: list[str] = []
    gaps: dict[str, list[float]] = {}
    tried: list[set[str]] = []
    for column in columns:
        known = {cell.method: cell.better or cell.chosen for cell in column.cells}
        means = {method: found.mean for method, each in known.items() if each and (found := each.mean_std("best"))}
        costs = {method: cost(mean, column.metric) for method, mean in means.items()}
        lowest = min(costs.values(), default=0.0)
        if len(costs) < 2 or not 0 < lowest < math.inf:  # a ratio to a perfect score has no meaning
            continue
        tasks.append(column.id)
        tried.append({cell.method for cell in column.cells if cell.tried})
        for method, value in costs.items():
            gaps.setdefault(method, []).extend([value / lowest - 1] if value < math.inf else [])
    everywhere = [method for method in ordered(gaps) if all(method in those for those in tried)]
    if len(tasks) < 2 or len(everywhere) < 2:
        return None
    return Profile(tuple(tasks), {method: tuple(sorted(gaps[method])) for method in everywhere})


def cost(mean: float, metric: Metric) -> float:
    """A positive cost, lower is better, for which ratios make sense."""
    if metric.better == "lower":
        return mean
    if metric.key.endswith("accuracy"):
        return 100 - mean
    return 1 / mean if mean > 0 else math.inf
