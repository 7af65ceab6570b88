"""The report: tables, figures and a page from folders of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aida_lab.cli.printing import console, fail, say, table

if TYPE_CHECKING:
    from aida_lab.report.results import Results

_REFERENCE = "aida-k2"


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs, as aida train makes them; by default: runs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report; made if missing.")] = Path("report"),
    reference: Annotated[
        str, typer.Option(help="The method that all others are tested against: aida-k2, adamw, ...")
    ] = _REFERENCE,
) -> None:
    """Put runs beside the paper's tables: means, tests, figures, and one page to look at.

    Writes index.html, which needs no other file, tables as Markdown, LaTeX and CSV, and figures as PNG
    and SVG. Only reads the runs: it can be called while others are still going on.
    """
    from aida_lab.report.build import read, write
    from aida_lab.report.listings import skipped
    from aida_lab.runs.files import StoreError, one_line

    roots = runs or [Path("runs")]
    for root in roots:
        if not root.is_dir():
            fail(f"no runs at {root}: it is no folder; aida train EXPERIMENT makes runs, by default in runs")
    try:
        with console().status("reading runs ..."):
            results = read(roots, reference)
    except StoreError as error:
        fail(str(error))
    if not results.collection.runs and not results.collection.unread:
        fail(f"no runs in {', '.join(map(str, roots))}; aida train EXPERIMENT makes runs, by default in runs")
    if reference not in results.measured:
        text = f"--reference {reference!r} has no runs; there are runs of {', '.join(results.measured) or 'nothing'}"
        if reference != _REFERENCE:
            fail(text)
        say(f"{text}. Nothing is tested", err=True)  # a comparison without Aida is one all the same
    try:
        with console().status("") as status:
            made = write(results, out, say=lambda text: status.update(f"{text} ..."))
    except (OSError, StoreError) as error:
        fail(f"the report cannot be written to {out}: {error}")
    _draw(results)
    for problem in (*skipped(results), *made.problems):
        say(one_line(f"left out: {problem}", 1000), err=True)
    say(f"wrote {len(made.files)} files to {out}; the page is {made.page}")


def _draw(results: Results) -> None:
    """The report in a few lines: one task in full, several at a glance."""
    from aida_lab.report.listings import census, glance
    from aida_lab.report.tables import comparison

    measured = results.columns
    found = comparison(measured[0]) if len(measured) == 1 else glance(results)
    if found.rows:
        drawn = table(found.title if len(measured) == 1 else "", *(head.text for head in found.heads))
        for row in found.rows:
            drawn.add_row(*(field.text for field in row))
        console().print(drawn)
    say(f"{len(results.collection.runs)} runs: {census(results)}")
