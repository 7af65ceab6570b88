"""``aida report``: tables, figures and a page from folders of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aida_lab.cli.choices import require_runs, require_writable
from aida_lab.cli.options import Runs
from aida_lab.cli.printing import console, fail, say, table
from aida_lab.runs.files import StoreError, one_line

if TYPE_CHECKING:
    from aida_lab.report.results import Results

_REFERENCE = "aida-k2"


def report(
    runs: Runs = None,
    out: Annotated[Path, typer.Option(help="Folder for the report; created if missing.")] = Path("report"),
    reference: Annotated[
        str, typer.Option(help="The method that all others are tested against, such as adamw.")
    ] = _REFERENCE,
) -> None:
    """Compare runs with each other and with the paper's tables: means, tests, figures and one page.

    Writes index.html, which needs no other file, tables as Markdown, LaTeX and CSV, and figures as PNG
    and SVG. The runs are only read, so you can make a report while other runs are still training.
    """
    from aida_lab.report.build import read, write
    from aida_lab.report.tables import skipped

    roots = runs or [Path("runs")]
    require_runs(roots)
    require_writable(out)
    with console().status("reading runs ..."):
        results = read(roots, reference)
    if not results.collection.runs and not results.collection.unread:
        fail(f"no runs in {', '.join(map(str, roots))}; aida train EXPERIMENT writes runs, by default into runs")
    if reference not in results.measured:
        text = f"--reference {reference!r} has no runs; there are runs of {', '.join(results.measured) or 'nothing'}"
        if reference != _REFERENCE:
            fail(text)
        say(f"{text}. Nothing is tested", err=True)  # the report is still useful without Aida
    try:
        with console().status("") as status:
            made = write(results, out, say=lambda text: status.update(f"{text} ..."))
    except (OSError, StoreError) as error:
        fail(f"cannot write the report to {out}: {error}")
    _draw(results)
    for problem in (*skipped(results), *made.problems):
        say(one_line(f"left out: {problem}", 1000), err=True)
    say(f"wrote {len(made.files)} files to {out}; the page is {made.page}")


def _draw(results: Results) -> None:
    """Print a short form of the report: the whole table of one task, or one row per task of several."""
    from aida_lab.report.tables import census, comparison
    from aida_lab.report.verdict import glance

    measured = results.columns
    found = comparison(measured[0]) if len(measured) == 1 else glance(results)
    if found.rows:
        heads, rows = [head.text for head in found.heads], ([field.text for field in row] for row in found.rows)
        console().print(table(found.title if len(measured) == 1 else "", heads, rows))
    say(f"{len(results.collection.runs)} runs: {census(results)}")
