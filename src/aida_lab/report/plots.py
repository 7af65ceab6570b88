"""The figures of a report, PNG and SVG: learning curves, time against metric, searches, the profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from aida.stepsizes.drawing import COLOURS, GREY, literal, new_figure, save, styled
from aida_lab.report import words
from aida_lab.report.columns import Column
from aida_lab.report.groups import Configuration
from aida_lab.report.landscape import Landscape, landscapes
from aida_lab.report.naming import DASHES, MARKERS, Look, file_name, looks, title
from aida_lab.report.profile import Profile, profile
from aida_lab.report.statistics import mean_std
from aida_lab.report.results import Results, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Quantity = Literal["metric", "loss"]

#: The first epochs are so far from all others that they would flatten them; the axis fits what comes after.
SETTLED = 0.1

#: Subplots beside each other, and letters that fit along one's side.
_ABREAST, _LABEL = 2, 32

_DASHED: tuple[Any, ...] = ("-", *((0, dash) for dash in DASHES[1:]))


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Every figure for which there are runs."""
    known = looks(results.methods)
    written: list[Path] = []
    for table in results.tables:
        columns = [column for column in table.columns if any(cell.chosen for cell in column.cells)]
        if not columns:
            continue
        written += _write(curves_of(columns, known), folder / f"curves-{table.name}")
        if timed := [column for column in columns if column.timed]:
            written += _write(times_of(timed, known), folder / f"time-{table.name}")
        written += _draw_searches(table, columns, known, folder)
    if found := profile(results.comparable):
        written += _write(profile_of(found, known), folder / "profile")
    return written


def curves_of(columns: Sequence[Column], known: dict[str, Look]) -> Figure:
    """The metric over the epochs: the mean over seeds, and a band of one standard deviation around it.

    Where an experiment is measured at its end alone, the training loss instead.
    """

    def draw(axis: Any, column: Column) -> None:
        chosen = {cell.method: cell.chosen for cell in column.cells if cell.chosen}
        quantity: Quantity = "metric"
        if all(len(mean_curve(each, "metric")[0]) < 2 for each in chosen.values()):
            quantity = "loss"
        ends: list[float] = []
        for method, each in reversed(chosen.items()):  # Aida last, above the others
            epochs, means, stds = mean_curve(each, quantity)
            if not epochs:
                continue
            look = known[method]
            axis.plot(epochs, means, label=title(method), **_line(look))
            if any(stds):
                low = [mean - std for mean, std in zip(means, stds, strict=True)]
                high = [mean + std for mean, std in zip(means, stds, strict=True)]
                axis.fill_between(epochs, low, high, color=COLOURS[look.colour], alpha=0.15, lw=0)
            settled = [mean for epoch, mean in zip(epochs, means, strict=True) if epoch > SETTLED * epochs[-1]]
            ends += [min(settled), max(settled)]
        if ends:
            room = 0.06 * (max(ends) - min(ends)) or 1.0
            axis.set_ylim(min(ends) - room, max(ends) + room)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel("epoch")
        axis.set_ylabel("training loss" if quantity == "loss" else _axis_label(column))

    return _panels(columns, draw, known)


def times_of(columns: Sequence[Column], known: dict[str, Look]) -> Figure:
    """What a method costs against what it gives, with the standard deviations over seeds."""

    def draw(axis: Any, column: Column) -> None:
        for cell in column.cells:
            found = cell.summary("best")
            seconds = cell.chosen.seconds() if cell.chosen else None
            if found and seconds:
                look = known[cell.method]
                axis.errorbar(
                    seconds.mean, found.mean, xerr=seconds.std or None, yerr=found.std or None,
                    fmt=MARKERS[look.colour], ms=6, color=COLOURS[look.colour], ecolor=COLOURS[look.colour],
                    elinewidth=0.8, mfc="white" if look.dash else COLOURS[look.colour], label=title(cell.method),
                )  # fmt: skip
        axis.set_xlabel("training seconds an epoch")
        axis.set_ylabel(_axis_label(column))

    return _panels(columns, draw, known)


def searches_of(found: Sequence[Landscape], known: dict[str, Look]) -> Figure:
    """Every configuration a point; the line goes through the best at each value."""

    def draw(axis: Any, landscape: Landscape) -> None:
        for method, points in landscape.points.items():
            look = known[method]
            ridge = landscape.ridge(method)
            axis.errorbar(
                [value for value, _ in ridge], [_mean(each) for _, each in ridge], [_std(each) for _, each in ridge],
                marker=MARKERS[look.colour], ms=4, elinewidth=0.8, label=title(method), **_line(look),
            )  # fmt: skip
            others = [(value, each) for value, each in points if (value, each) not in ridge]
            axis.plot(
                [value for value, _ in others], [_mean(each) for _, each in others], ls="", marker=MARKERS[look.colour],
                ms=3, alpha=0.4, color=COLOURS[look.colour],
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel(literal(landscape.setting))
        axis.set_ylabel(_axis_label(landscape.column))

    return _panels(found, draw, known)


def profile_of(found: Profile, known: dict[str, Look]) -> Figure:
    with styled():
        figure = new_figure(7.2, 3.8)
        axis = figure.subplots()
        furthest = 100 * max(gap for gaps in found.gaps.values() for gap in gaps) * 1.08 or 1.0
        for place, (method, gaps) in enumerate(found.gaps.items()):
            steps = sorted({0.0, *(100 * gap for gap in gaps), furthest})
            shares = [sum(100 * gap <= step for gap in gaps) / len(found.tasks) for step in steps]
            above = 2 + 1 / (1 + place)  # the first methods are not covered by the others
            axis.step(steps, shares, where="post", label=literal(title(method)), zorder=above, **_line(known[method]))
        axis.set_xlabel("gap to the lowest cost, %")
        axis.set_ylabel(f"share of {words.plural(len(found.tasks), 'task')} within the gap")
        axis.set_ylim(-0.03, 1.03)
        axis.set_xscale("symlog", linthresh=1)  # from 0 on, and a decade as wide as another
        axis.set_xlim(0, furthest)
        axis.xaxis.set_major_formatter("{x:g}")
        figure.legend(loc="outside right center", handlelength=3)
    return figure


def mean_curve(configuration: Configuration, quantity: Quantity) -> tuple[list[int], list[float], list[float]]:
    """Epochs that every counted seed has measured, the means there, and the standard deviations (0 for one seed)."""
    rows = [dict(zip(run.curve.epochs, getattr(run.curve, quantity), strict=True)) for run in configuration.counted]
    epochs = [epoch for epoch in rows[0] if all(row.get(epoch) is not None for row in rows)] if rows else []
    found = [mean_std([row[epoch] for row in rows]) for epoch in epochs]
    return epochs, [each.mean for each in found], [each.std or 0.0 for each in found]


def _draw_searches(table: Table, columns: Sequence[Column], known: dict[str, Look], folder: Path) -> list[Path]:
    by_setting: dict[str, list[Landscape]] = {}
    for column in columns:
        for each in landscapes(column):
            by_setting.setdefault(each.setting, []).append(each)
    return [
        path
        for setting, found in by_setting.items()
        for path in _write(searches_of(found, known), folder / f"search-{file_name(setting)}-{table.name}")
    ]


def _panels(parts: Sequence[Any], draw: Callable[[Any, Any], None], known: dict[str, Look]) -> Figure:
    """A subplot for each column, one legend for all."""
    with styled():
        abreast = min(_ABREAST, len(parts))
        rows = -(-len(parts) // abreast)
        figure = new_figure(1.9 + 4.2 * abreast, 0.3 + 3.1 * rows)
        axes = figure.subplots(rows, abreast, squeeze=False).ravel()
        legend: dict[str, Any] = {}
        for axis, part in zip(axes, parts, strict=False):
            draw(axis, part)
            column = part.column if isinstance(part, Landscape) else part
            axis.set_title(literal(column.title) + "\n", fontsize=10)
            axis.text(
                0.5, 1.02, literal(_subtitle(part)), transform=axis.transAxes, ha="center", color=GREY, fontsize=7.5
            )
            legend.update(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        for axis in axes[len(parts) :]:
            axis.set_axis_off()
        order = [title(method) for method in known if title(method) in legend]
        figure.legend([legend[name] for name in order], map(literal, order), loc="outside right center", handlelength=3)
    return figure


def _subtitle(part: Column | Landscape) -> str:
    if isinstance(part, Landscape):
        column, shown = part.column, [each for points in part.points.values() for _, each in points]
    else:
        column, shown = part, [cell.chosen for cell in part.cells if cell.chosen]
    seeds = sorted({len(each.counted) for each in shown})
    n = f"n = {seeds[0]}" if len(seeds) == 1 else f"n = {seeds[0]} to {seeds[-1]}"
    return f"{column.detail}; {n}; {column.metric.better} is better"


def _axis_label(column: Column) -> str:
    return literal(fill(column.metric.title, _LABEL))


def _line(look: Look) -> dict[str, Any]:
    return {"color": COLOURS[look.colour], "ls": _DASHED[look.dash], "lw": 1.5}


def _mean(configuration: Configuration) -> float:
    found = configuration.summary("best")
    assert found is not None
    return found.mean


def _std(configuration: Configuration) -> float:
    found = configuration.summary("best")
    return found.std or 0.0 if found else 0.0


def _write(figure: Figure, stem: Path) -> list[Path]:
    return list(save(figure, stem))
