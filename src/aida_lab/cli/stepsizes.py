"""``aida stepsizes``: figures of the adaptive stepsizes that runs recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aida_lab.cli.choices import require_writable
from aida_lab.cli.printing import console, fail, say, say_written, table
from aida_lab.runs.files import StoreError, file_exists, is_archive, one_line

if TYPE_CHECKING:
    from aida.stepsizes.sinks import StepsizeLog

_FILE = "stepsizes.jsonl"


def stepsizes(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Runs that recorded stepsizes, each a folder or its stepsizes.jsonl; or a folder of runs.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figures; created if missing.")] = Path("report"),
) -> None:
    """Draw the adaptive stepsizes of training runs, layer by layer.

    Writes stepsizes.png and stepsizes.svg with one column per run (means and standard deviations), and each
    figure of the paper if all its methods are among the runs. A folder of runs is shown by the lowest seed of
    each method. A run records its stepsizes with aida train --probe, or in your own training loop with
    aida.stepsizes.StepsizeProbe.
    """
    from aida.stepsizes.drawing import save
    from aida.stepsizes.plots import draw, draw_paper_figures

    require_writable(out)
    read = {path: _read(path) for given in runs for path in _expanded(given)}
    logs = {path: found for path, found in read.items() if not isinstance(found, str)}
    skipped = [found for found in read.values() if isinstance(found, str)]
    if not logs:
        fail("\n".join(skipped))
    _draw_table(logs)
    found = list(logs.values())
    try:
        say_written([*save(draw(found, ("mean", "std")), out / "stepsizes"), *draw_paper_figures(found, out)])
    except OSError as error:
        fail(f"cannot write the figures to {out}: {error}")
    for reason in skipped:
        say(f"left out: {reason}", err=True)


def _expanded(given: Path) -> list[Path]:
    """The run itself, or one run per method of a folder of runs."""
    from aida_lab.report.plots import RUNS_ABREAST
    from aida_lab.runs.records import holds_runs, scan

    if not holds_runs(given) or os.path.lexists(given / _FILE):
        return [given]
    specs = {each.path: each.spec for each in scan(given) if each.spec is not None and file_exists(each.path / _FILE)}
    others = {path.parent for path in given.glob(f"*/{_FILE}")} - set(specs)  # of loops that are not of the lab
    if not specs and not others:
        return [given]  # left out, with the reason
    names = sorted({spec.experiment for spec in specs.values()})
    if len(names) > 1:
        fail(f"{given} has stepsizes of {', '.join(names)}; name the runs of one experiment, which aida runs lists")
    by_method: dict[str, Path] = {}
    for path, spec in sorted(specs.items(), key=lambda item: item[1].seed):
        by_method.setdefault(spec.method, path)
    shown = [*by_method.values(), *sorted(others)][:RUNS_ABREAST]
    if len(shown) < len(specs) + len(others):
        count = f"shows {len(shown)} of {len(specs) + len(others)} runs, one per method and at most {RUNS_ABREAST}"
        say(f"{given}: {count}; name the folders of runs to see others")
    return shown


def _draw_table(logs: Mapping[Path, StepsizeLog]) -> None:
    rows = []
    for run, log in logs.items():
        if log.across:
            last = log.across[-1]
            share = "" if last.at_bound is None else f"{last.at_bound:.1%}"
            rows.append((str(run), last.method, str(last.step), str(last.layers), f"{last.spread:.3g}", share))
    heads = ("run", "method", "step", "layers", "spread", "at the bound")
    console().print(table("stepsizes at the last measurement", heads, rows))


def _read(run: Path) -> StepsizeLog | str:
    """The records of a run, or why there are none."""
    from aida_lab.report.plots import read_stepsizes

    if is_archive(run):
        return f"no stepsizes in {run}: a run records them with aida train --probe"
    archived = is_archive(run.parent)
    if not archived and not os.path.lexists(run):
        below = (found for depth in ("*", "*/*", "*/*/*") for found in Path().glob(f"{depth}/{_FILE}"))
        here = sorted({found.parent for found in below})[:20]
        known = f"; runs below this folder: {', '.join(map(str, here))}" if here else ""
        fail(f"no stepsizes at {run}: it does not exist; expected a folder with {_FILE}, or such a file{known}")
    try:
        # a link that the user names is followed, a link in a run's folder is not
        return read_stepsizes(run / _FILE if archived or run.is_dir() else Path(os.path.realpath(run)))
    except (StoreError, ValueError) as error:
        return one_line(error)
