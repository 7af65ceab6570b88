"""The optimizers themselves: what they are, their theory, their stepsizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aida_lab.cli.printing import console, fail, say, say_written, table, values_in_words

if TYPE_CHECKING:
    from aida.stepsizes.sinks import StepsizeLog


def list_optimizers(
    names: Annotated[
        list[str] | None, typer.Argument(help="Optimizers to describe in full, such as: aida adabelief-star.")
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
        "aida list NAME shows one in full: defaults, what each experiment fixes and searches, where eps sits.",
        style="dim",
    )


def theory(
    out: Annotated[
        Path | None, typer.Option(help="Folder for theory.png, theory.svg and theory.md; made if missing.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each convex run.")] = 1500,
) -> None:
    """Check the paper's theory on real convex problems, under a minute.

    Evaluates Theorem 1 term by term beside the measured regret of Aida and AdaBelief in logistic
    regression, counts how often its assumption on the variances holds, and shows a run that breaks it.
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
        typer.Argument(help="Folders that hold stepsizes.jsonl, or such files; several become columns side by side."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figures; made if missing.")] = Path("report"),
) -> None:
    """Draw the adaptive stepsizes of training runs, layer by layer.

    Writes stepsizes.png and .svg (means and standard deviations), and each figure of the paper whose
    methods are all among the runs. A run records its stepsizes with aida train --probe, or in a loop
    of your own with aida.stepsizes.StepsizeProbe.
    """
    from aida.stepsizes.drawing import save
    from aida.stepsizes.plots import draw, draw_paper_figures

    read = {run: _read(run) for run in runs}
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


def _read(run: Path) -> StepsizeLog | str:
    """The records of a run, or why there are none."""
    from aida_lab.report.stepsize_figures import read_stepsizes
    from aida_lab.runs.files import StoreError, is_archive, one_line

    archived = is_archive(run.parent)
    if not archived and not os.path.lexists(run):
        below = (found for depth in ("*", "*/*", "*/*/*") for found in Path().glob(f"{depth}/stepsizes.jsonl"))
        here = sorted({found.parent for found in below})[:20]
        known = f"; runs below this folder: {', '.join(map(str, here))}" if here else ""
        fail(f"no stepsizes at {run}: a run is a folder with stepsizes.jsonl, or such a file{known}")
    try:
        # a link that the user names is followed, a link in a run's folder is not
        return read_stepsizes(run / "stepsizes.jsonl" if archived or run.is_dir() else Path(os.path.realpath(run)))
    except (StoreError, ValueError) as error:
        return one_line(error)


def _found(name: str) -> Any:
    from aida.catalog import find

    try:
        return find(name)
    except LookupError as error:
        fail(str(error.args[0]))


def _describe(entry: Any) -> None:
    from torch import nn

    drawn = table(f"{entry.title} ({entry.name})", "", "")
    group = entry.build([nn.Parameter(nn.init.zeros_(nn.Linear(1, 1).weight))]).param_groups[0]
    bound = entry.reading.bound(group)
    rows = {
        "update": entry.rule,
        "paper": str(entry.paper),
        "defaults": values_in_words(entry.defaults),
        **(experiments := _by_experiment(entry)),
        "stepsize": entry.reading.about + ("" if bound is None else f"; at most {bound:.4g} with the defaults"),
        "eps": entry.reading.eps,
        "notes": entry.notes,
    }
    for name, text in rows.items():
        drawn.add_row(name, text, end_section=name == "defaults" or name in experiments)
    console().print(drawn)


def _by_experiment(entry: Any) -> dict[str, str]:
    """What is fixed and what is searched, by experiment; experiments with the same values together."""
    from aida_lab.progress.labels import value_in_words

    names: dict[str, list[str]] = {}
    for experiment in dict.fromkeys([*entry.tuned, *entry.searched]):
        said = [values_in_words(entry.tuned.get(experiment, {}))]
        for setting, values in entry.searched.get(experiment, {}).items():
            said.append(f"searched: {setting} {', '.join(map(value_in_words, values))}")
        names.setdefault("\n".join(filter(None, said)), []).append(experiment)
    return {"\n".join(experiments): values for values, experiments in names.items() if values}
