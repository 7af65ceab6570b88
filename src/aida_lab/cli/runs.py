"""Runs that were made: what is in a folder of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aida_lab.cli.printing import console, fail, say, table

if TYPE_CHECKING:
    from aida_lab.runs.store import RunRecord

_STYLES = {"finished": "green", "running": "cyan", "diverged": "yellow", "failed": "red", "damaged": "red"}


def list_runs(
    out: Annotated[Path, typer.Argument(metavar="[OUT]", help="The folder of runs.")] = Path("runs"),
    experiment: Annotated[str | None, typer.Option(help="Only runs of this experiment.")] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only runs in this state: finished, diverged, running, stopped, failed or damaged."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the runs of a folder: state, metric, epoch, age.

    A run that is stopped or failed goes on where it was when its aida train command is given again.
    """
    from typing import get_args

    from aida_lab.runs.files import StoreError, json_text
    from aida_lab.runs.records import State, holds_runs, scan

    if state is not None and state not in get_args(State):
        fail(f"--state {state!r} is none of {', '.join(get_args(State))}")
    if not holds_runs(out):
        fail(f"no runs at {out}: it is no folder; aida train EXPERIMENT makes runs, by default in runs")
    try:
        found = [_described(record) for record in scan(out)]
    except StoreError as error:
        fail(str(error))
    if experiment is not None:
        known = sorted({run["experiment"] for run in found if run["experiment"]})
        if experiment not in known:
            fail(f"no run of {experiment!r} in {out}; there are runs of {', '.join(known) or 'nothing'}")
        found = [run for run in found if run["experiment"] == experiment]
    if state is not None:
        found = [run for run in found if run["state"] == state]
    if as_json:
        typer.echo(json_text(found, indent=2))
        return
    _draw(found, out)


def _draw(found: list[dict[str, Any]], out: Path) -> None:
    from rich.text import Text

    from aida_lab.progress.labels import settings_in_words
    from aida_lab.progress.status import in_words
    from aida_lab.runs.files import one_line

    drawn = table(
        "", "run", "experiment", "method", "seed", "state", "best (epoch)", "last", "epoch", "age", dense=True
    )
    drawn.columns[0].no_wrap = True
    for run in found:
        best = f"{run['metric']} {in_words(run['best'])} ({run['best_epoch']})" if run["best"] is not None else ""
        drawn.add_row(
            one_line(run["key"]),
            run["experiment"],
            f"{run['method']} {settings_in_words(run['differing'])}".strip(),
            str(run["seed"]) if run["seed"] is not None else "",
            Text(run["state"], style=_STYLES.get(run["state"], "")),
            best,
            in_words(run["last"]),
            f"{run['epoch']}/{run['epochs']}" if run["epochs"] else "",
            _age(run["age"]),
        )
    console().print(drawn)
    for run in found:
        if run["problem"]:
            said = one_line(f"{run['key']} {run['state']}: {run['problem']}", 1000)
            console().print(said, style="red", soft_wrap=True)
    console().print(f"{len(found)} runs in {out}", style="dim", soft_wrap=True)


def _described(record: RunRecord) -> dict[str, Any]:
    """A run as one flat object; what cannot be known is None or empty."""
    from aida_lab.progress.labels import differing
    from aida_lab.runs.files import in_json
    from aida_lab.runs.summary import summary_of

    spec, measured = record.spec, summary_of(record)
    return {
        "key": record.path.name,
        "experiment": spec.experiment if spec else "",
        "variant": spec.variant if spec else "",
        "optimizer": spec.optimizer if spec else "",
        "method": spec.method if spec else "",
        "hyper": in_json(dict(spec.hyper)) if spec else {},
        "differing": in_json(differing(spec)) if spec else {},
        "seed": spec.seed if spec else None,
        "precision": spec.precision if spec else "",
        "state": record.state,
        "metric": measured.metric,
        "best": measured.best,
        "best_epoch": measured.best_epoch,
        "last": measured.last,
        "seconds": measured.seconds,
        "epoch": record.rows,
        "epochs": spec.epochs if spec else None,
        "age": round(max(time.time() - record.changed, 0.0), 1),
        "folder": str(record.path),
        "problem": record.problem,
    }


def _age(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3 h``, ``5 d``: since something in the run's folder changed."""
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def collect_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="Where the records go; made if missing.")] = Path("results"),
) -> None:
    """Collect the records of finished runs in one compressed file per experiment: OUT/EXPERIMENT.tar.xz.

    A record is the spec, environment, curve, stepsizes and result of a run, without weights. aida runs, report and
    stepsizes read OUT like a folder of runs; tar xf gives the folders. Runs that are there already stay as they are,
    so that runs of several machines can be collected one after another.
    """
    from aida_lab.runs.collecting import collect
    from aida_lab.runs.files import StoreError, one_line
    from aida_lab.runs.records import holds_runs

    for root in runs:
        if not holds_runs(root):
            fail(f"no runs at {root}: it is no folder")
    try:
        found = collect(runs, out)
    except StoreError as error:
        fail(str(error))
    say(f"{len(found.added)} runs added to {out}, {found.size / 1e6:.1f} MB; {found.known} were there")
    for folder, reason in found.left:
        say(one_line(f"left out: {folder} is {reason}", 1000), err=True)
