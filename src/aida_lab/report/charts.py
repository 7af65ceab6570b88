"""What each chart shows, as values. ``plots.py`` draws them as PNG and SVG, ``chart.js`` draws them on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from aida_lab.report import words
from aida_lab.report.columns import Column
from aida_lab.report.groups import Configuration
from aida_lab.report.profile import Profile
from aida_lab.report.statistics import MeanStd, mean_std
from aida_lab.report.sweeps import expected_best, lr_of
from aida_lab.runs.checks import finite
from aida_lab.spec import Metric

Quantity = Literal["metric", "loss"]
#: "gap" is linear from 0 to 1 and logarithmic above.
Scale = Literal["linear", "log", "gap"]

#: The first epochs are far from all others. The y axis fits the points after this share of the x axis.
SETTLED = 0.1

#: The same for best of k: a single learning rate drawn at random may be very bad.
_FIRST_DRAWS = 0.15

#: Points per curve on the page: more than a screen can show is useless, fewer than 20 hide the shape.
_MOST, _FEWEST = 200, 20
#: Points of all curves of runs together; about seven bytes each.
_BUDGET = 450_000


@dataclass(frozen=True)
class Axis:
    label: str
    scale: Scale = "linear"
    digits: int = 2
    better: str = ""  #: "higher", "lower" or neither
    integer: bool = False
    pad: float = 0.06  #: room at both ends, as a share of the range
    ends: tuple[float, float] | None = None  #: fixed ends instead of those of the data


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None  #: one standard deviation around y, if there are several seeds
    high: float | None = None
    x_std: float | None = None  #: one standard deviation of x
    opens: str = ""  #: the configuration behind the point
    note: str = ""  #: what a tooltip adds to the numbers
    best: bool = False  #: drawn with a ring around it


@dataclass(frozen=True)
class Series:
    method: str
    kind: Literal["line", "steps", "points"]
    points: tuple[Point, ...]
    marked: bool = False  #: drawn with a marker and an error bar at every point instead of a band
    minor: bool = False  #: in the background


@dataclass(frozen=True)
class Chart:
    name: str
    label: str  #: on the button that selects it
    title: str
    subtitle: str
    about: str
    series: tuple[Series, ...]
    x: Axis
    y: Axis
    settled: float = 0.0


def views(column: Column, epochs: Sequence[int]) -> list[Chart]:
    """Every chart of a column, the most useful one first; none without finished runs."""
    if not column.finished:
        return []
    metric, loss = curves(column, "metric", epochs), curves(column, "loss", epochs)
    # an experiment may be measured only after its last epoch
    first = [metric, loss] if any(len(each.points) > 1 for each in metric.series) else [loss, metric]
    rest = [times(column)] if column.timed else []
    tuned = [sensitivity(column), best_of_k(column)] if column.sweeps else []
    # the sensitivity shows the learning rates
    searched = [each for each in searches(column) if not tuned or each.name != "search-lr"]
    return [each for each in first if each.series] + rest + tuned + searched


def curves(column: Column, quantity: Quantity, epochs: Sequence[int]) -> Chart:
    """Mean over seeds per epoch, with a band of one standard deviation."""
    means = {cell.method: mean_curve(cell.chosen, quantity, epochs) for cell in column.cells if cell.chosen}
    loss = quantity == "loss"
    log = loss and all(found.mean > 0 for curve in means.values() for found in curve.values())
    scale: Scale = "log" if log else "linear"
    opens = {cell.method: cell.chosen.id for cell in column.cells if cell.chosen}
    series = tuple(
        Series(method, "line", tuple(_point(epoch, found, scale, opens[method]) for epoch, found in curve.items()))
        for method, curve in means.items()
        if curve
    )
    label = ("training loss" if loss else column.metric.title) + (", log scale" if log else "")
    digits, better = (4, "lower") if loss else (column.digits, column.metric.better)
    return _chart(
        column, quantity, "Training loss" if loss else "Learning curves", series,
        Axis("epoch", integer=True, pad=0.01), Axis(label, scale, digits, better), SETTLED,
    )  # fmt: skip


def times(column: Column) -> Chart:
    """The metric against the training time per epoch."""
    series = []
    for cell in column.cells:
        best, seconds = cell.mean_std("best"), cell.chosen.seconds() if cell.chosen else None
        if cell.chosen and best and seconds:
            note = f"{words.seconds(seconds.mean)} s per epoch, n={best.n}"
            point = _point(seconds.mean, best, "linear", cell.chosen.id, note, seconds.std)
            series.append(Series(cell.method, "points", (point,), marked=True))
    return _chart(column, "time", "Time against metric", series, Axis("training seconds per epoch"), _metric(column))


def searches(column: Column) -> list[Chart]:
    """One chart per hyper-parameter that varies between configurations of a method, eps and lr first."""
    found: dict[str, list[Series]] = {}
    for cell in column.cells:
        measured = [each for each in cell.configurations if each.counted]
        for setting in dict.fromkeys(name for each in measured for name in each.hyper):
            values = [finite(each.hyper.get(setting)) or 0.0 for each in measured]
            if len(set(values)) > 1 and min(values) > 0:  # a log axis cannot show others, nor switches and texts
                points = sorted(zip(values, measured, strict=True), key=lambda point: (point[0], point[1].id))
                found.setdefault(setting, []).extend(_searched(cell.method, points, column.metric))
    return [
        _chart(
            column, f"search-{setting}", f"Search: {setting}", found[setting],
            Axis(f"{setting}, log scale", "log", pad=0.04), _metric(column),
        )
        for setting in sorted(found, key=lambda name: (name != "eps", name != "lr", name))
    ]  # fmt: skip


def _searched(method: str, points: Sequence[tuple[float, Configuration]], metric: Metric) -> Iterable[Series]:
    """Every configuration over one hyper-parameter; the line connects the best one at each value."""
    means = {each.id: mean for _, each in points if (mean := each.mean_std("best"))}
    best: dict[float, Configuration] = {}
    for value, each in points:
        if value not in best or metric.improves(means[each.id].mean, means[best[value].id].mean):
            best[value] = each
    for minor in (False, True):
        shown = [(value, each) for value, each in points if (best[value] is not each) == minor]
        drawn = []
        for value, each in shown:
            note = f"n={len(each.counted)}; {words.settings(each.hyper)}"
            drawn.append(_point(value, means[each.id], "linear", each.id, note))
        if drawn:
            yield Series(method, "points" if minor else "line", tuple(drawn), marked=True, minor=minor)


def sensitivity(column: Column) -> Chart:
    """The tuning runs over the learning rate, each method's best one marked."""
    series, shown = [], []
    for each in column.sweeps:
        mean = each.fresh.mean_std("best") if each.fresh else None
        fresh = f"; fresh seeds {words.spread(mean, column.digits)}, n={mean.n}" if mean else ""
        points = []
        for configuration in each.configurations:
            lr, value = lr_of(configuration), each.values[lr_of(configuration)]
            best, note = lr == each.best, f"lr {words.plain(lr)}"
            if value is not None:  # a diverged run has no point
                points.append(Point(lr, value, opens=configuration.id, note=note + fresh * best, best=best))
        ranked = sorted((point.y for point in points), key=column.metric.sort_key)
        shown += ranked[: (len(ranked) + 1) // 2]  # the others may be very far away
        series.append(Series(each.name, "line", tuple(points), marked=True))
    room = 0.06 * (max(shown) - min(shown)) if shown else 0.0
    ends = (min(shown) - room, max(shown) + room) if room else None
    seeds = ", ".join(map(str, sorted(frozenset().union(*(each.seeds for each in column.sweeps)))))
    chart = _chart(
        column, "sensitivity", "Learning-rate sensitivity", [each for each in series if each.points],
        Axis("learning rate, log scale", "log", pad=0.04), replace(_metric(column), ends=ends),
    )  # fmt: skip
    said = f"{column.setup.manner}; tuning seed {seeds}; rings: the best; {column.metric.better} is better"
    return replace(chart, subtitle=said)


def best_of_k(column: Column) -> Chart:
    """What a smaller budget would have found: the expected best of k learning rates of the grid."""
    finished = [value for each in column.sweeps for value in each.values.values() if value is not None]
    worst = max(finished, key=column.metric.sort_key, default=0.0)
    series = []
    for each in column.sweeps:
        values = [worst if value is None else value for value in each.values.values()]
        expected = enumerate(expected_best(values, column.metric), start=1)
        series.append(Series(each.name, "line", tuple(Point(k, value) for k, value in expected)))
    chart = _chart(
        column, "best-of-k", "Best of k", series, Axis("k learning rates, drawn at random", integer=True, pad=0.02),
        replace(_metric(column), label=f"expected best {column.metric.title}"), _FIRST_DRAWS,
    )  # fmt: skip
    said = f"{column.setup.manner}; one tuning run per learning rate; a diverged run counts as the worst finished one"
    return replace(chart, subtitle=said)


def profile_chart(found: Profile) -> Chart:
    """The share of tasks on which each method is within a gap of the best."""
    furthest = 108 * max(gap for gaps in found.gaps.values() for gap in gaps) or 1.0
    series = []
    for method, gaps in found.gaps.items():
        stops = sorted({0.0, *(100 * gap for gap in gaps), furthest})
        series.append(Series(method, "steps", tuple(Point(x, found.share(method, x / 100 + 1e-12)) for x in stops)))
    tasks = words.plural(len(found.tasks), "task")
    return Chart(
        "profile", "", "", "", f"Performance profile: share of {tasks} within a gap of the best", tuple(series),
        Axis("gap to the lowest cost, %; log scale above 1", "gap", 1, pad=0),
        Axis(f"share of {tasks} within the gap", digits=2, better="higher", ends=(-0.03, 1.03)),
    )  # fmt: skip


def mean_curve(configuration: Configuration, quantity: Quantity, epochs: Iterable[int]) -> dict[int, MeanStd]:
    """Mean and standard deviation at those of ``epochs`` that every counted seed has measured."""
    rows = [dict(zip(run.curve.epochs, getattr(run.curve, quantity), strict=True)) for run in configuration.counted]
    return {
        epoch: mean_std([row[epoch] for row in rows])
        for epoch in epochs
        if rows and all(row.get(epoch) is not None for row in rows)
    }


def shown_epochs(column: Column, runs: int) -> list[int]:
    """The epochs that a column's curves show, in a report of ``runs`` runs."""
    return thinned(column.setup.epochs, max(_FEWEST, min(_MOST, _BUDGET // max(1, runs))))


def thinned(epochs: int, points: int) -> list[int]:
    """At most ``points`` epochs, evenly spaced from the first to the last; the same for every run of a column."""
    if epochs <= points:
        return list(range(1, epochs + 1))
    return [1 + round(step * (epochs - 1) / (points - 1)) for step in range(points)]


def in_json(chart: Chart, rounded: Callable[[float], float]) -> dict[str, Any]:
    """The chart for the page's script: points as one list per field, fields without a value left out."""

    def of_series(each: Series) -> dict[str, Any]:
        found: dict[str, Any] = {
            "method": each.method, "kind": each.kind, "marked": each.marked, "minor": each.minor,
        }  # fmt: skip
        for name in ("x", "y", "low", "high", "x_std"):
            values = [getattr(point, name) for point in each.points]
            if any(value is not None for value in values):
                found[name] = [None if value is None else rounded(value) for value in values]
        for name in ("opens", "note", "best"):
            texts = [getattr(point, name) for point in each.points]
            if any(texts):
                found[name] = texts[0] if len(set(texts)) == 1 else texts
        return found

    plain = {name: getattr(chart, name) for name in ("name", "label", "about", "settled")}
    return {**plain, "x": vars(chart.x), "y": vars(chart.y), "series": [of_series(each) for each in chart.series]}


def _point(x: float, found: MeanStd, scale: Scale, opens: str, note: str = "", x_std: float | None = None) -> Point:
    """On a log axis the band is symmetric on that axis: y - std may be negative, which the axis cannot show."""
    mean, std = found.mean, found.std
    low = None if not std else mean * mean / (mean + std) if scale == "log" else mean - std
    return Point(x, mean, low, mean + std if std else None, x_std or None, opens, note)


def _chart(
    column: Column, name: str, label: str, series: Sequence[Series], x: Axis, y: Axis, settled: float = 0.0
) -> Chart:
    seeds = sorted({len(cell.chosen.counted) for cell in column.cells if cell.chosen})
    n = f"n = {seeds[0]}" if len(seeds) == 1 else f"n = {seeds[0]} to {seeds[-1]}"
    subtitle = f"{column.setup.manner}; {n}; {column.metric.better} is better"
    about = f"{column.title}: {y.label} over {x.label}"
    return Chart(name, label, column.title, subtitle, about, tuple(series), x, y, settled)


def _metric(column: Column) -> Axis:
    return Axis(column.metric.title, digits=column.digits, better=column.metric.better)
