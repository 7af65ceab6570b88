"""The charts of a report, and the paper's figures of layerwise stepsizes, as PNG and SVG files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from aida.stepsizes.drawing import COLOURS, GREY, literal, new_figure, save, styled
from aida.stepsizes.plots import draw, draw_paper_figures
from aida.stepsizes.sinks import StepsizeLog, read_jsonl
from aida_lab.report.charts import Chart, Series, profile_chart, shown_epochs, views
from aida_lab.report.columns import Column
from aida_lab.report.naming import DASHES, MARKERS, Look, file_name, looks, title
from aida_lab.report.profile import profile
from aida_lab.report.results import Results
from aida_lab.runs.files import STEPSIZES_LIMIT, StoreError, file_exists, one_line, read_regular
from aida_lab.runs.records import STEPSIZES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Subplots side by side, and letters that fit along the side of one.
_ABREAST, _LABEL = 2, 32
#: Runs side by side in one figure of stepsizes, and layers in it, each a line; more are not readable.
RUNS_ABREAST, _LAYERS = 6, 5000
_DASHED: tuple[Any, ...] = ("-", *((0, dash) for dash in DASHES[1:]))


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Every figure for which there are runs: one per table and view, and the performance profile."""
    known = looks(results.names)
    written: list[Path] = []
    for table in results.tables:
        figures: dict[str, list[Chart]] = {}
        for column in table.columns:
            shown = views(column, shown_epochs(column, len(results.collection.runs)))
            for chart in [*shown[:1], *(each for each in shown[1:] if each.name not in ("metric", "loss"))]:
                name = "curves" if chart.name in ("metric", "loss") else chart.name
                figures.setdefault(f"{file_name(name)}-{table.name}", []).append(chart)
        for name, charts in figures.items():
            written += save(figure_of(charts, known), folder / name)
    if found := profile(results.comparable):
        written += save(figure_of([profile_chart(found)], known), folder / "profile")
    return written


def figure_of(charts: Sequence[Chart], known: Mapping[str, Look]) -> Figure:
    """One subplot per chart, one legend for all."""
    with styled():
        abreast = min(_ABREAST, len(charts))
        rows = -(-len(charts) // abreast)
        wide = 7.2 if len(charts) == 1 else 1.9 + 4.2 * abreast
        figure = new_figure(wide, 0.3 + 3.1 * rows)
        axes = figure.subplots(rows, abreast, squeeze=False).ravel()
        handles: dict[str, Any] = {}
        for axis, chart in zip(axes, charts, strict=False):
            for place, series in reversed(list(enumerate(chart.series))):  # the first methods above the others
                handle = _draw(axis, series, known[series.method], place)
                if not series.minor:
                    handles[series.method] = handle
            _axes(axis, chart)
        for axis in axes[len(charts) :]:
            axis.set_axis_off()
        order = [method for method in known if method in handles]
        names = [literal(title(method)) for method in order]
        figure.legend([handles[method] for method in order], names, loc="outside right center", handlelength=3)
    return figure


def _draw(axis: Any, series: Series, look: Look, place: int) -> Any:
    colour = COLOURS[look.colour]
    points = series.points
    x, y = [point.x for point in points], [point.y for point in points]
    style: dict[str, Any] = {
        "color": colour, "lw": 1.5, "ls": "" if series.kind == "points" else _DASHED[look.dash],
        "marker": [*MARKERS[look.colour], MARKERS[look.colour][0]], "mfc": "white" if look.dash else colour,
        "drawstyle": "steps-post" if series.kind == "steps" else "default", "alpha": 0.4 if series.minor else 1.0,
        "ms": 3 if series.minor else 5,
    }  # fmt: skip
    banded = [point for point in points if point.low is not None and point.high is not None]
    if series.marked:
        for point in banded:
            axis.plot([point.x] * 2, [point.low, point.high], color=colour, lw=0.8, alpha=style["alpha"])
        for point in points:
            if point.x_std:
                axis.plot([point.x - point.x_std, point.x + point.x_std], [point.y] * 2, color=colour, lw=0.8)
    else:
        # a few markers per line, at different places for each method
        style["markevery"] = (place % max(1, len(points) // 8), max(1, len(points) // 8))
        if banded:
            low, high = [point.low for point in banded], [point.high for point in banded]
            axis.fill_between([point.x for point in banded], low, high, color=colour, alpha=0.15, lw=0)
    for point in (point for point in points if point.best):
        axis.plot([point.x], [point.y], ls="", marker="o", ms=11, mfc="none", mec=colour, mew=1.2)
    (line,) = axis.plot(x, y, zorder=3 - place / 100, **style)
    return line


def _axes(axis: Any, chart: Chart) -> None:
    for name, each in (("x", chart.x), ("y", chart.y)):
        getattr(axis, f"set_{name}label")(literal(fill(each.label, _LABEL) if name == "y" else each.label))
        if each.scale == "log":
            getattr(axis, f"set_{name}scale")("log")
        elif each.scale == "gap":
            getattr(axis, f"set_{name}scale")("symlog", linthresh=1)
            getattr(axis, f"{name}axis").set_major_formatter("{x:g}")
        if each.integer:
            getattr(axis, f"{name}axis").get_major_locator().set_params(integer=True)
    if chart.y.ends:
        axis.set_ylim(*chart.y.ends)
    elif chart.settled and chart.y.scale == "linear":
        after = [
            point.y
            for series in chart.series
            for point in series.points
            if point.x > chart.settled * series.points[-1].x
        ]
        room = 0.06 * (max(after) - min(after)) or 1.0
        axis.set_ylim(min(after) - room, max(after) + room)
    if chart.x.pad == 0:
        axis.set_xlim(0, max(point.x for series in chart.series for point in series.points))
    if chart.title:
        axis.set_title(literal(chart.title) + "\n", fontsize=10)
        style = {"transform": axis.transAxes, "ha": "center", "color": GREY, "fontsize": 7.5}
        axis.text(0.5, 1.02, literal(chart.subtitle), **style)


def draw_stepsizes(results: Results, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the paper's figures whose methods were measured, and one of all methods; returns files and problems."""
    written: list[Path] = []
    problems: list[str] = []
    for column in results.columns:
        if logs := _stepsizes(column, problems):
            place = folder / f"stepsizes-{column.id}"
            written += draw_paper_figures(logs, place)
            written += save(draw(logs[:RUNS_ABREAST], ("mean", "std")), place / "all")
    return written, problems


def _stepsizes(column: Column, problems: list[str]) -> list[StepsizeLog]:
    """One run per method: the lowest seed of its best configuration with a probe.

    Aida with another number of projections is another method, as in the paper's figures.
    """
    logs: list[StepsizeLog] = []
    for cell in column.cells:
        for run in (run for each in cell.configurations for run in (*each.runs, *each.repeats)):
            if file_exists(run.folder / STEPSIZES):
                try:
                    logs.append(read_stepsizes(run.folder / STEPSIZES))
                    break
                except (StoreError, ValueError) as error:
                    problems.append(one_line(error))
    return logs


def read_stepsizes(path: Path) -> StepsizeLog:
    """The records of a run; StoreError or ValueError if there are none."""
    content = read_regular(path, STEPSIZES_LIMIT)
    if content is None:
        raise StoreError(f"{path} is not there: a run records its stepsizes with aida train --probe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a torn last line: the run is then listed as unfinished
        log = read_jsonl(path, content)
    layers = len({record.layer for record in log.layers})
    if layers > _LAYERS:
        raise ValueError(f"{path} has {layers:,} layers; at most {_LAYERS:,} can be drawn")
    return log
