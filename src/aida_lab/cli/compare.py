"""``aida compare``: which of two methods is better on each experiment, and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aida_lab.cli.choices import require_runs
from aida_lab.cli.options import Runs
from aida_lab.cli.printing import fail, mean_in_words, say

if TYPE_CHECKING:
    from aida_lab.report.collect import Run
    from aida_lab.report.columns import Column
    from aida_lab.report.groups import Configuration


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A method, such as aida-k2.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The method to compare it with, such as adamw.")],
    runs: Runs = None,
    within: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="MARGIN",
            help="Also test whether the means are equivalent: whether they differ by less than MARGIN.",
        ),
    ] = None,
) -> None:
    """Say which of two methods is better on each experiment, and how sure that is.

    Compares the means over seeds at the best epoch with Student's t-test; --within adds two one-sided t-tests,
    because "no significant difference" does not mean that there is none. If a method has several
    configurations, the one that aida report would choose counts; a better one, with fewer seeds or with values
    that the paper did not try, is named too. aida report compares all methods at once.
    """
    from aida_lab.experiments import experiments
    from aida_lab.report.collect import Collection, read_runs
    from aida_lab.report.results import arrange

    roots = runs or [Path("runs")]
    require_runs(roots)
    found = read_runs(roots, experiments()).runs
    first, second = (_method(name, found, roots) for name in (a, b))
    if first == second:
        fail(f"{a} and {b} are the same method, {first}; name two methods")
    pair = Collection(tuple(run for run in found if run.spec.method in (first, second)), ())
    verdicts = [_verdict(column, first, within) for column in arrange(pair, experiments(), reference=second).columns]
    for verdict in verdicts:
        say(verdict)
    if all("not compared" in verdict for verdict in verdicts):
        raise typer.Exit(1)


def _method(name: str, runs: tuple[Run, ...], roots: list[Path]) -> str:
    """The method of that name. The name of an optimizer is enough if its runs are all of one method."""
    known = sorted({run.spec.method for run in runs})
    found = [name] if name in known else sorted({run.spec.method for run in runs if run.spec.optimizer == name})
    if len(found) > 1:
        fail(f"{name!r} is ambiguous: there are runs of {' and '.join(found)}; name one of them")
    if not found:
        fail(f"no runs of {name!r} in {', '.join(map(str, roots))}; there are runs of {', '.join(known) or 'nothing'}")
    return found[0]


def _verdict(column: Column, method: str, margin: float | None) -> str:
    """What is known of ``method`` against the column's reference."""
    from aida_lab.report.statistics import LEVEL, equivalence
    from aida_lab.report.words import p_value

    cells = [column.cell(method), column.cell(column.reference)]
    one, other = ((cell and cell.mean_std("best")) or None for cell in cells)
    if cells[0] is None or one is None or other is None:
        lacking = [name for name, known in ((method, one), (column.reference, other)) if known is None]
        return f"{column.title}: not compared, no finished run of {' and '.join(lacking)}"
    found = cells[0].against_reference["best"]
    first, second = (method, column.reference) if column.gain(found) > 0 else (column.reference, method)
    p = f"p = {p_value(found)}".replace("= <", "<")
    if found.p is None:
        said = f"not tested: {found.reason}"
    elif found.significant:
        said = f"{first} is better than {second} ({p})"
    else:
        said = f"no significant difference between {method} and {column.reference} ({p})"
    equivalent = None if margin is None else equivalence(found, margin)
    if equivalent is not None and (equivalent < LEVEL or not found.significant):
        shown = "equivalent" if equivalent < LEVEL else "not shown to be equivalent"
        said += f"; {shown} within {margin:g} (p = {equivalent:.2g})"
    interval = "" if found.interval is None else ", 95 % interval {:+.3g} to {:+.3g}".format(*found.interval)
    means = ", ".join(f"{cell.method} {_mean(cell.chosen)}" for cell in cells if cell and cell.chosen)
    better = [(cell.method, cell.better) for cell in cells if cell and cell.better]
    notes = "".join(f"\n  but {name} has a better configuration: {_mean(known)}" for name, known in better)
    measured = f"{column.metric.title}, {column.metric.better} is better"
    return f"{column.title}: {said}\n  {measured}: {means}; difference {found.difference:+.3g}{interval}{notes}"


def _mean(configuration: Configuration) -> str:
    from aida_lab.progress.labels import differing, settings_in_words

    found, values = configuration.mean_std("best"), settings_in_words(differing(configuration.runs[0].spec))
    return f"{mean_in_words(found)} (n = {found.n if found else 0}{'; ' if values else ''}{values})"
