"""The commands ``aida list``, ``aida theory`` and ``aida stepsizes``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aida_lab.cli.printing import console, fail, say, say_written, table, values_in_words

if TYPE_CHECKING:
    from aida.catalog import Entry
    from aida.stepsizes.sinks import StepsizeLog


def list_optimizers(
    names: Annotated[
        list[str] | None, typer.Argument(help="Optimizers to describe in full, for example: aida adabelief-star.")
    ] = None,
) -> None:
    """List the optimizers, with their update rules and papers.

    Any of them can be built from Python: aida.catalog.find("adabelief").build(model.parameters(), lr=1e-3)
    """
    from aida.catalog import catalog

    if names:
        for entry in [_found(name) for name in names]:
            _describe(entry)
        return
    drawn = table("", "name", "method", "update in one line", "paper")
    for entry in catalog().values():
        drawn.add_row(entry.name, entry.title, entry.rule, f"{entry.paper.authors.split(',')[0]} {entry.paper.year}")
    console().print(drawn)
    console().print(
        "aida list NAME shows one in full: defaults, fixed and searched values per experiment, the place of eps.",
        style="dim",
    )


def theory(
    out: Annotated[
        Path | None, typer.Option(help="Folder for theory.png, theory.svg and theory.md; created if missing.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps per convex run.")] = 1500,
) -> None:
    """Check the paper's theory on real convex problems; takes less than a minute.

    Evaluates Theorem 1 term by term and the measured regret of Aida and AdaBelief in logistic
    regression, counts how often its assumption on the variances holds, and shows a run that violates it.
    docs/theory.md explains the tables.
    """
    from rich.markdown import Markdown

    from aida_lab.theory import study

    with console().status("minimising logistic losses and running both methods ..."):
        found = study.run(steps)
    text = study.as_markdown(found)
    console().print(Markdown(text))
    if out is not None:
        from aida_lab.theory.figure import draw_to

        out.mkdir(parents=True, exist_ok=True)
        (out / "theory.md").write_text(text + "\n", encoding="utf-8")
        say_written([out / "theory.md", *draw_to(found, out)])


def stepsizes(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Runs with a stepsizes.jsonl, folders of such runs, or such files; each run is a column."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figures; created if missing.")] = Path("report"),
) -> None:
    """Draw the adaptive stepsizes of training runs, layer by layer.

    Writes stepsizes.png and .svg (means and standard deviations), and each figure of the paper if its
    methods are all among the runs. aida train --probe records stepsizes; in your own training loop use
    aida.stepsizes.StepsizeProbe.
    """
    from aida.stepsizes.drawing import save
    from aida.stepsizes.plots import draw, draw_paper_figures

    read = {run: _read(run) for given in runs for run in _runs_in(given)}
    logs = {run: found for run, found in read.items() if not isinstance(found, str)}
    skipped = [found for found in read.values() if isinstance(found, str)]
    if not logs and all(map(os.path.isfile, runs)):
        fail("\n".join(skipped))
    if logs:
        _draw_table(logs)
        found = list(logs.values())
        try:
            say_written([*save(draw(found, ("mean", "std")), out / "stepsizes"), *draw_paper_figures(found, out)])
        except OSError as error:
            fail(f"the figures cannot be written to {out}: {error}")
    for reason in skipped:
        say(f"left out: {reason}", err=True)


def _draw_table(logs: Mapping[Path, StepsizeLog]) -> None:
    drawn = table("stepsizes at the last measurement", "run", "method", "step", "layers", "spread", "at the bound")
    for run, log in logs.items():
        if log.across:
            last = log.across[-1]
            share = "" if last.at_bound is None else f"{last.at_bound:.1%}"
            drawn.add_row(str(run), last.method, str(last.step), str(last.layers), f"{last.spread:.3g}", share)
    console().print(drawn)


def _runs_in(folder: Path) -> list[Path]:
    """Return the runs with stepsizes in a folder of runs; any other path itself."""
    below = [] if os.path.lexists(folder / "stepsizes.jsonl") else folder.glob("*/stepsizes.jsonl")
    return sorted(found.parent for found in below) or [folder]


def _read(run: Path) -> StepsizeLog | str:
    """Return the records of a run, or the reason why there are none."""
    from aida_lab.report.stepsize_figures import read_stepsizes
    from aida_lab.runs.files import StoreError, one_line

    if not os.path.lexists(run):
        below = (found for depth in ("*", "*/*", "*/*/*") for found in Path().glob(f"{depth}/stepsizes.jsonl"))
        here = sorted({found.parent for found in below})[:20]
        known = f"; runs below this folder: {', '.join(map(str, here))}" if here else ""
        fail(f"no stepsizes at {run}: a run is a folder with stepsizes.jsonl, or such a file{known}")
    try:
        # follow a link that the user names, but not a link in a run's folder
        return read_stepsizes(run / "stepsizes.jsonl" if os.path.isdir(run) else Path(os.path.realpath(run)))
    except (StoreError, ValueError) as error:
        return one_line(error)


def _found(name: str) -> Entry:
    from aida.catalog import find

    try:
        return find(name)
    except LookupError as error:
        fail(str(error.args[0]))


def _describe(entry: Entry) -> None:
    import torch

    drawn = table(f"{entry.title} ({entry.name})", "", "")
    group = entry.build([torch.nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
    bound = entry.reading.bound(group)
    rows = {
        "update": entry.rule,
        "paper": str(entry.paper),
        "defaults": values_in_words(entry.defaults),
        **(experiments := _by_experiment(entry.name)),
        "stepsize": entry.reading.about + ("" if bound is None else f"; at most {bound:.4g} with the defaults"),
        "eps": entry.reading.eps,
        "notes": entry.notes,
    }
    for name, text in rows.items():
        drawn.add_row(name, text, end_section=name == "defaults" or name in experiments)
    console().print(drawn)


def _by_experiment(optimizer: str) -> dict[str, str]:
    """The fixed and the searched values per experiment; experiments with the same values share a row."""
    from aida_lab.experiments import experiments
    from aida_lab.progress.labels import value_in_words

    names: dict[str, list[str]] = {}
    for experiment in experiments().values():
        for method, tuning in experiment.tuning.items():
            if method == optimizer or method.startswith(f"{optimizer}-k"):  # aida-k1 has values of its own
                lines = [values_in_words(tuning.fixed)] if tuning.fixed else []
                for name, values in tuning.searched.items():
                    lines.append(f"searched: {name} {', '.join(map(value_in_words, values))}")
                label = experiment.name if method == optimizer else f"{experiment.name} ({method})"
                names.setdefault("\n".join(lines), []).append(label)
    return {"\n".join(together): values for values, together in names.items()}
