"""The table of a column's learning-rate sweeps: each method's budget and result, and how soon it reaches the target."""

from __future__ import annotations

from collections.abc import Callable

from aida_lab.report import words
from aida_lab.report.columns import Column
from aida_lab.report.formats import Field, Grid, Head, absent, grid
from aida_lab.report.naming import title
from aida_lab.report.sweeps import Reach, Sweep, reach

#: The method that sets the target, if it has fresh seeds; else the report's reference.
TARGET_SETTER = "adamw"


def target(column: Column) -> tuple[Sweep, float] | None:
    """The method that sets the target, and the value that more than half of its fresh seeds reach; None if none has."""
    setters = [each for name in (TARGET_SETTER, column.reference) for each in column.sweeps if each.method == name]
    for sweep, fresh in ((each, each.fresh) for each in setters):
        values = sorted(fresh.values("best"), key=column.metric.sort_key) if fresh else []
        middle = (len(values) + fresh.diverged) // 2 if fresh else 0
        if middle < len(values):
            return sweep, values[middle]
    return None


def tuning(column: Column) -> Grid | None:
    """One row per sweep; None if the column has none."""
    if not column.sweeps:
        return None
    digits, aim = column.digits, target(column)

    def rates(each: Sweep) -> Field:
        lost = [words.plain(lr) for lr, value in each.values.items() if value is None]
        shown = f"{len(each.values)}: {words.plain(min(each.values))} to {words.plain(max(each.values))}"
        return Field(shown, len(each.values), note=f"diverged at {', '.join(lost)}" if lost else "")

    def best(each: Sweep) -> Field:
        if each.best is None:
            return absent("every run diverged")
        return Field(words.plain(each.best), each.best, note="at the edge" if each.at_the_edge else "")

    def chosen(each: Sweep) -> Field:
        value = None if each.best is None else each.values[each.best]
        return absent("") if value is None else Field(words.number(value, digits), value)

    def fresh(each: Sweep) -> Field:
        mean = each.fresh.mean_std("best") if each.fresh else None
        if each.fresh is None or mean is None:
            return absent("none")
        lost = f"{each.fresh.diverged} diverged" if each.fresh.diverged else ""
        return Field(f"{words.spread(mean, digits)}, n={mean.n}", mean.mean, opens=each.fresh.id, note=lost)

    heads = [
        Head("method", lambda each: Field(title(each.name)), numeric=False),
        Head("learning rates", rates, "how many were tried, and their range"),
        Head("best", best, "the learning rate with the best run; of equal ones, one inside the grid, then the smaller"),
        Head("tuning", chosen, "the run that chose it, at its best epoch: the best of several, so not a fair number"),
        Head("fresh seeds", fresh, "the same learning rate with other seeds: mean ± std at the best epoch"),
    ]
    remarks = ["A number is a run's best epoch. A diverged run counts as the worst."]
    if aim:
        heads += _to_target(column, aim[1])
        remarks.append(
            f"Target: {words.number(aim[1], digits)}, the median of {title(aim[0].name)} over its fresh seeds at the "
            "best epoch. Epochs, steps and training seconds to it are medians over fresh seeds too; a run that does "
            "not reach it counts as the latest."
        )
    return grid(f"tuning-{column.id}", f"{column.title}: tuning", heads, column.sweeps, remarks).without_empty()


def _to_target(column: Column, aim: float) -> list[Head]:
    """How many runs of fresh seeds reach the target, and when."""
    found = {each.name: reach(each.fresh, aim, column.metric) for each in column.sweeps if each.fresh}
    unreached = {name for name, each in found.items() if each.epochs is None}

    def of(show: Callable[[Reach], Field]) -> Callable[[Sweep], Field]:
        return lambda each: show(found[each.name]) if each.name in found else absent("")

    def amount(name: str) -> Callable[[Sweep], Field]:
        def shown(each: Sweep) -> Field:
            if each.name in unreached:
                return absent("not reached" if name == "epochs" else "")
            value = getattr(found[each.name], name) if each.name in found else None
            return absent("") if value is None else Field(f"{value:.3g}" if value < 1000 else f"{value:,.0f}", value)

        return shown

    late = "median over fresh seeds"
    return [
        Head("reached", of(lambda each: Field(f"{each.reached} of {each.runs}", each.reached)), "runs at the target"),
        *(Head(f"{name} to target", amount(name), late) for name in ("epochs", "steps", "seconds")),
    ]
