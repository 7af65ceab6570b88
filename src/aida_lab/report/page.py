"""The page: text, tables, charts and scripts in one file that loads nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aida._version import __version__
from aida.stepsizes.drawing import COLOURS, DARK_COLOURS
from aida_lab.report import listings, tables, verdict, words
from aida_lab.report.columns import Column
from aida_lab.report.grids import Grid
from aida_lab.report.naming import looks, ordered, title
from aida_lab.report.payload import payload
from aida_lab.report.profile import DEFINITION, profile
from aida_lab.report.results import Results, Table
from aida_lab.report.statistics import LEVEL, PAPER_REPETITIONS

if TYPE_CHECKING:
    from jinja2 import Environment

#: In this order: later files use what earlier ones define.
_SCRIPTS = ("scales.js", "marks.js", "chart.js", "runs.js", "main.js")

#: Bytes of figures in the page; further figures are only linked.
_EMBEDDED = 4_000_000


@dataclass(frozen=True)
class Picture:
    """A drawn figure: embedded, and beside the page as PNG and SVG."""

    name: str
    about: str
    #: A data: address; empty if it would make the page too heavy.
    source: str
    png: str
    svg: str


@dataclass(frozen=True)
class Verdict:
    column: Column
    sentence: str
    dots: verdict.Dots | None


@dataclass(frozen=True)
class Part:
    """A table's section of the page."""

    table: Table
    overview: Grid | None
    #: Each column with its table and the table of its search, if several configurations were tried.
    columns: tuple[tuple[Column, Grid, Grid | None], ...]
    #: Indices of the columns with finished runs in the payload.
    charts: tuple[int, ...]
    #: Whether the figure of times was drawn.
    timed: bool
    pictures: tuple[Picture, ...]


def page(
    results: Results, out: Path, stepsizes: Iterable[Path], problems: Sequence[str], lies_in: Path | None = None
) -> str:
    """The text of ``index.html``, for the folder ``lies_in`` (by default ``out``).

    ``stepsizes`` are the figures already drawn below ``out``; ``problems`` says which could not be drawn.
    """
    data = payload(results, lies_in or out)
    pictures = _pictures(stepsizes, out)
    return _environment().get_template("page.html.jinja").render(
        results=results,
        title=title(results.reference),
        census=listings.census(results),
        total=len(results.collection.runs),
        heading=_heading(results),
        verdicts=[Verdict(each, verdict.sentence(each), verdict.dots(each)) for each in _judged(results)],
        glance=listings.glance(results),
        looks=looks(results.methods),
        missing=_missing(results),
        excluded=listings.excluded(results),
        problems=problems,
        parts=[_part(table, results, pictures) for table in results.tables],
        profile=profile(results.comparable),
        definition=DEFINITION,
        level=LEVEL,
        repetitions=PAPER_REPETITIONS,
        version=__version__,
        plural=words.plural,
        style=_palette() + _asset("style.css"),
        script="\n".join(_asset(name) for name in _SCRIPTS),
        data=_embedded(data),
    )  # fmt: skip


def _reproduces(results: Results) -> bool:
    """Whether any of the paper's tables has runs."""
    return any(table.columns for table in results.paper)


def _missing(results: Results) -> list[Table]:
    """The paper's tables without runs; a report of other experiments does not name them."""
    return [table for table in results.paper if not table.columns and (_reproduces(results) or not results.columns)]


def _judged(results: Results) -> list[Column]:
    """The columns of the verdict: experiments as declared if there are any, with a finished run of the reference."""
    finished = [each for each in results.comparable or results.columns if any(cell.chosen for cell in each.cells)]
    own = [each for each in finished if (cell := each.cell(each.reference)) and cell.chosen]
    return own or finished


def _heading(results: Results) -> str:
    if _reproduces(results) or not results.columns:
        return "Optimizers compared: our runs and the paper's tables"
    methods = ordered(run.spec.method for run in results.collection.runs)
    tasks = list(dict.fromkeys(each.experiment.title if each.experiment else each.name for each in results.columns))
    on = tasks[0] if len(tasks) == 1 else words.plural(len(tasks), "task")
    return f"{words.plural(len(methods), 'optimizer')} on {on}"


def _palette() -> str:
    """The methods' colours as CSS variables, for light and dark pages."""
    light, dark = (
        "".join(f"--c{place}: {colour.lower()}; " for place, colour in enumerate(colours))
        for colours in (COLOURS, DARK_COLOURS)
    )
    return f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"


def _part(table: Table, results: Results, pictures: Sequence[Picture]) -> Part:
    places = {column.id: index for index, column in enumerate(results.columns)}
    ids = [column.id for column in table.columns]
    finished = [column for column in table.columns if any(cell.chosen for cell in column.cells)]
    return Part(
        table,
        tables.overview(table) if len(table.columns) > 1 else None,
        tuple((column, tables.comparison(column), _search(column)) for column in table.columns),
        tuple(places[column.id] for column in finished),
        any(column.timed for column in finished),
        tuple(picture for picture in pictures if any(f"stepsizes-{id}/" in picture.png for id in ids)),
    )


def _search(column: Column) -> Grid | None:
    return tables.search(column) if any(len(cell.configurations) > 1 for cell in column.cells) else None


def _pictures(drawn: Iterable[Path], out: Path) -> list[Picture]:
    found = []
    left = _EMBEDDED
    for svg in (path for path in drawn if path.suffix == ".svg"):
        size = svg.stat().st_size * 4 // 3
        source = ""
        if size <= left:
            left -= size
            source = "data:image/svg+xml;base64," + base64.b64encode(svg.read_bytes()).decode()
        place = svg.relative_to(out).as_posix()
        found.append(Picture(svg.stem, _ABOUT.get(svg.stem, svg.stem), source, place[:-3] + "png", place))
    return found


_ABOUT = {
    "figure-1": "As the paper's Figure 1: layerwise means of the adaptive stepsizes",
    "figure-2": "As the paper's Figure 2: layerwise standard deviations of the adaptive stepsizes",
    "figure-3": "As the paper's Figure 3: layerwise means, AdaBelief* and AdaBelief",
    "figure-adam-plus": "As the paper's figure of Adam+: layerwise means, Adam and Adam+",
    "all": "Adaptive stepsizes of every method that was measured, layerwise means and standard deviations",
}


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end its script element early."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _asset(name: str) -> str:
    return (resources.files("aida_lab.report") / "assets" / name).read_text(encoding="utf-8")
