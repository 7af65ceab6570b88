"""The paper's figures of layerwise stepsizes, from the JSONL files of any runs.

One column per run, one line per layer, a shared log axis, and the bound as a dashed line. The figures show how close
the lines are to one another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from aida.stepsizes.drawing import GREY, literal, new_figure, save, styled
from aida.stepsizes.records import LayerStepsizes
from aida.stepsizes.sinks import StepsizeLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Statistic = Literal["mean", "std"]

_NAMES: dict[Statistic, str] = {"mean": "layerwise mean", "std": "layerwise standard deviation"}

#: Up to this many layers are named in a legend; more are shown by a colour bar.
_NAMED = 12


#: The paper's figures: the statistic and the methods of each.
PAPER_FIGURES: dict[str, tuple[Statistic, tuple[str, ...]]] = {
    "figure-1": ("mean", ("Adam", "AdaBelief", "Aida")),
    "figure-2": ("std", ("Adam", "AdaBelief", "Aida")),
    "figure-3": ("mean", ("AdaBelief*", "AdaBelief")),
    "figure-adam-plus": ("mean", ("Adam", "Adam+")),
}


def draw(logs: Sequence[StepsizeLog], statistics: Sequence[Statistic] = ("mean",)) -> Figure:
    """Draw runs side by side, one row per statistic. Draws only weight tensors, if there are any."""
    if not logs:
        raise ValueError("no run to draw: pass at least one log of aida.read_jsonl")
    with styled():
        figure = new_figure(1.6 + 3.3 * len(logs), 0.9 + 2.9 * len(statistics))
        axes = figure.subplots(len(statistics), len(logs), sharex=True, sharey="row", squeeze=False)
        names = list(dict.fromkeys(record.layer for log in logs for record in _weights(log)))
        colours = _colours(len(names))
        for column, log in enumerate(logs):
            for row, statistic in enumerate(statistics):
                _draw_run(axes[row, column], log, statistic, dict(zip(names, colours, strict=True)))
            axes[0, column].set_title(_title(log, statistics[0]))
            axes[-1, column].set_xlabel("step")
        for row, statistic in enumerate(statistics):
            axes[row, 0].set_ylabel(f"{_NAMES[statistic]}\nof the adaptive stepsizes, log scale")
        _explain_colours(figure, axes, names, colours)
    return figure


def draw_paper_figures(logs: Iterable[StepsizeLog], folder: str | os.PathLike[str]) -> list[Path]:
    """Write those of the paper's figures whose methods all have runs, as PNG and SVG."""
    found: dict[str, list[StepsizeLog]] = {}
    for log in logs:
        found.setdefault(log.method, []).append(log)
    written: list[Path] = []
    for name, (statistic, methods) in PAPER_FIGURES.items():
        if all(method in found for method in methods):
            runs = [log for method in methods for log in found[method]]
            written += save(draw(runs, (statistic,)), Path(folder) / name)
    return written


def _weights(log: StepsizeLog) -> list[LayerStepsizes]:
    """The records of weights, as in the paper: biases and norms would add tens of lines."""
    weights = [record for record in log.layers if len(record.shape) >= 2]
    return weights or list(log.layers)


def _draw_run(axis: Any, log: StepsizeLog, statistic: Statistic, colours: dict[str, Any]) -> None:
    lines: dict[str, list[LayerStepsizes]] = {}
    for record in _weights(log):
        lines.setdefault(record.layer, []).append(record)
    for layer, records in lines.items():
        records.sort(key=lambda record: record.step)
        steps, values = [r.step for r in records], [getattr(r, statistic) for r in records]
        marker = "o" if len(records) == 1 else None  # a line of one point is invisible
        axis.plot(steps, values, color=colours[layer], lw=1.5, marker=marker, ms=3)
    axis.set_yscale("log")
    if statistic == "mean":
        _draw_bounds(axis, log)


def _draw_bounds(axis: Any, log: StepsizeLog) -> None:
    bounds = sorted({record.bound for record in _weights(log) if record.bound is not None})
    highest = max(record.mean for record in _weights(log))
    for bound in bounds:
        if bound > 100 * highest:  # 1/eps is decades above the lines and would squeeze them together
            axis.annotate(
                f"bound {bound:.0e}, off the scale", (0.97, 0.97), xycoords="axes fraction", ha="right", va="top",
                color=GREY, fontsize=8,
            )  # fmt: skip
            continue
        axis.axhline(bound, color=GREY, ls="--", lw=1)
        axis.annotate(
            f"bound {bound:.4g}", (0.97, bound), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", ha="right", va="bottom", color=GREY, fontsize=8,
        )  # fmt: skip


def _title(log: StepsizeLog, statistic: Statistic) -> str:
    """The method, and the final spread of its stepsizes: across layers, or inside them."""
    hyper = log.layers[-1].hyper
    words = [log.method]
    if "projections" in hyper:
        words.append(f"K = {hyper['projections']}")
    if isinstance(hyper.get("eps"), (int, float)):
        words.append(f"eps = {hyper['eps']:g}")
    title = literal(", ".join(words))
    weights = _weights(log)
    ends = [getattr(record, statistic) for record in weights if record.step == weights[-1].step]
    if statistic == "std":
        title += f"\nmedian layer: {median(ends):.3g}"
    elif min(ends) > 0:
        title += f"\nlargest : smallest mean: {max(ends) / min(ends):.3g}"
    return title


def _colours(number: int) -> list[Any]:
    """Colours from dark to light by depth, readable in grey print and by colour-blind readers."""
    from matplotlib import colormaps

    scale = colormaps["viridis"]
    return [scale(0.92 * i / max(1, number - 1)) for i in range(number)]


def _explain_colours(figure: Any, axes: Any, names: list[str], colours: list[Any]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.lines import Line2D

    if len(names) <= _NAMED:
        lines = [Line2D([], [], color=colour, lw=2) for colour in colours]
        figure.legend(lines, map(literal, names), loc="outside right center", title="layer, from the input on")
        return
    shown = ScalarMappable(Normalize(1, len(names)), ListedColormap(colours))
    figure.colorbar(shown, ax=axes, label="layer, from the input on", shrink=0.8, ticks=[1, len(names)])
