"""A whole report: reads run folders, writes tables, figures and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aida_lab.experiments import experiments
from aida_lab.report import formats, tables
from aida_lab.report.collect import read_runs
from aida_lab.report.page import page
from aida_lab.report.plots import draw_all, draw_stepsizes
from aida_lab.report.publish import PAGE, publishing
from aida_lab.report.results import Results, Table, arrange
from aida_lab.report.tuning import tuning
from aida_lab.spec import Experiment


@dataclass(frozen=True)
class Report:
    """The written files, and what could not be drawn."""

    page: Path
    files: tuple[Path, ...]
    problems: tuple[str, ...]


def read(
    roots: Sequence[Path], reference: str = "aida-k2", declared: Mapping[str, Experiment] | None = None
) -> Results:  # fmt: skip
    """The runs below ``roots``, arranged in tables.

    ``reference`` is the method that all others are tested against. ``declared`` are the experiments by name, by default
    those of the lab.
    """
    known = experiments() if declared is None else declared
    return arrange(read_runs(roots, known), known, reference)


def write(results: Results, out: Path, say: Callable[[str], None] = lambda text: None) -> Report:
    """Write tables, figures and the page to ``out``, replacing an earlier report; ``say`` receives the progress."""
    with publishing(out) as making:
        say("writing tables")
        files = write_tables(results, making / "tables")
        say("drawing figures")
        figures = draw_all(results, making / "figures")
        stepsizes, problems = draw_stepsizes(results, making / "figures")
        say("writing the page")
        place = making / PAGE
        place.write_bytes(encoded(page(results, making, out, stepsizes, problems)))
        made = [out / path.relative_to(making) for path in (place, *files, *figures, *stepsizes)]
    return Report(made[0], tuple(made), tuple(problems))


def encoded(text: str) -> bytes:
    """UTF-8; bytes of a path that are not UTF-8 are written as escapes."""
    return text.encode("utf-8", "backslashreplace")


def write_tables(results: Results, folder: Path) -> list[Path]:
    """Each table as Markdown, LaTeX and CSV; all configurations and runs as CSV; the excluded runs."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str] = {}
    for table in results.tables:
        texts[f"{table.name}.md"] = _markdown(table)
        texts[f"{table.name}.tex"] = _latex(table)
        texts[f"{table.name}.csv"] = formats.cells_csv(table.columns)
    texts["configurations.csv"] = formats.configurations_csv(results.columns)
    texts["runs.csv"] = formats.runs_csv(results.collection.runs)
    texts["excluded.md"] = formats.markdown(tables.excluded(results), level=1)
    for name, text in texts.items():
        (folder / name).write_bytes(encoded(text))
    return [folder / name for name in texts]


def _markdown(table: Table) -> str:
    parts = [f"# {table.title}\n"]
    if len(table.columns) > 1:
        parts.append(formats.markdown(replace(tables.overview(table), title="Overview")))
    for column in table.columns:
        about = f"{column.metric.title}, {column.metric.better} is better. {column.setup.manner}."
        parts.append(formats.markdown(tables.comparison(column), subtitle=about))
        if found := tuning(column):
            parts.append(formats.markdown(found, level=3))
        if tables.searched(column):
            parts.append(formats.markdown(tables.search(column), level=3))
    return "\n".join(parts)


def _latex(table: Table) -> str:
    parts = [formats.latex(tables.overview(table))] if len(table.columns) > 1 else []
    parts += [formats.latex(tables.comparison(column), column.setup.manner) for column in table.columns]
    return "\n".join(parts)
