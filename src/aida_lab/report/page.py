"""One page that holds everything: text, tables, curves and scripts, and asks for nothing from anywhere."""

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
from aida_lab.report import listings, tables, words
from aida_lab.report.columns import Column
from aida_lab.report.grids import Grid
from aida_lab.report.naming import title
from aida_lab.report.payload import payload
from aida_lab.report.profile import DEFINITION, profile
from aida_lab.report.statistics import LEVEL, PAPER_REPETITIONS
from aida_lab.report.results import Results, Table

if TYPE_CHECKING:
    from jinja2 import Environment

#: In this order: later files use what earlier ones define.
_SCRIPTS = ("scales.js", "chart.js", "views.js", "runs.js", "main.js")

#: Bytes of figures that are put into the page; what goes beyond lies beside it and is linked.
_EMBEDDED = 4_000_000


@dataclass(frozen=True)
class Picture:
    """A drawn figure: embedded, and beside the page as PNG and SVG."""

    name: str
    about: str
    #: A data: address; empty where it would make the page too heavy.
    source: str
    png: str
    svg: str


@dataclass(frozen=True)
class Part:
    """A table's section of the page."""

    table: Table
    overview: Grid | None
    #: For each column with its table and that of its search, the latter None where nothing was searched.
    columns: tuple[tuple[Column, Grid, Grid | None], ...]
    #: Indices into the payload's columns, of those that have finished runs.
    charts: tuple[int, ...]
    #: Whether its figures were drawn: without a finished run there is nothing in them, or in that of times without one
    #: that had its GPU to itself.
    drawn: bool
    timed: bool
    pictures: tuple[Picture, ...]


def page(
    results: Results, out: Path, stepsizes: Iterable[Path], problems: Sequence[str], lies_in: Path | None = None
) -> str:
    """The text of ``index.html``, which will lie in ``lies_in``, by default ``out``.

    ``stepsizes`` are figures that were drawn before, below ``out``; ``problems`` says which could not be.
    """
    data = payload(results, lies_in or out)
    pictures = _pictures(stepsizes, out)
    return _environment().get_template("page.html.jinja").render(
        results=results,
        title=title(results.reference),
        census=listings.census(results),
        total=len(results.collection.runs),
        glance=listings.glance(results) if results.comparable else None,
        excluded=listings.excluded(results),
        problems=problems,
        # what there is to see first
        parts=[_part(table, results, pictures) for table in sorted(results.tables, key=lambda each: not each.runs)],
        profile=profile(results.comparable),
        definition=DEFINITION,
        level=LEVEL,
        repetitions=PAPER_REPETITIONS,
        version=__version__,
        plural=words.plural,
        style=_asset("style.css"),
        script="\n".join(_asset(name) for name in _SCRIPTS),
        data=_embedded(data),
    )  # fmt: skip


def _part(table: Table, results: Results, pictures: Sequence[Picture]) -> Part:
    places = {column.id: index for index, column in enumerate(results.columns)}
    ids = [column.id for column in table.columns]
    finished = [column for column in table.columns if any(cell.chosen for cell in column.cells)]
    return Part(
        table,
        tables.overview(table) if len(table.columns) > 1 else None,
        tuple((column, tables.comparison(column), _search(column)) for column in table.columns),
        tuple(places[column.id] for column in finished),
        bool(finished),
        any(column.timed for column in finished),
        tuple(picture for picture in pictures if any(f"stepsizes-{id}/" in picture.png for id in ids)),
    )


def _search(column: Column) -> Grid | None:
    return tables.search(column) if any(len(cell.configurations) > 1 for cell in column.cells) else None


def _pictures(drawn: Iterable[Path], out: Path) -> list[Picture]:
    found = []
    left = _EMBEDDED
    for png in (path for path in drawn if path.suffix == ".png"):
        size = png.stat().st_size * 4 // 3
        source = ""
        if size <= left:
            left -= size
            source = "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode()
        place = png.relative_to(out).as_posix()
        found.append(Picture(png.stem, _ABOUT.get(png.stem, png.stem), source, place, place[:-3] + "svg"))
    return found


_ABOUT = {
    "figure-1": "As the paper's Figure 1: layerwise means of the adaptive stepsizes",
    "figure-2": "As the paper's Figure 2: layerwise standard deviations of the adaptive stepsizes",
    "figure-3": "As the paper's Figure 3: layerwise means, AdaBelief* and AdaBelief",
    "figure-adam-plus": "As the paper's figure of Adam+: layerwise means, Adam and Adam+",
    "all": "Adaptive stepsizes of every method that was measured, layerwise means and standard deviations",
}


def _embedded(data: dict[str, Any]) -> str:
    """JSON that no sequence of letters in it can end early."""
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
