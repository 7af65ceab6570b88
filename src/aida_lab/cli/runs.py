"""``aida runs`` and ``aida collect``: what is in a folder of runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aida_lab.cli.choices import require_runs, require_writable
from aida_lab.cli.printing import console, fail, say, table

if TYPE_CHECKING:
    from aida_lab.runs.store import RunRecord
    from aida_lab.runs.summary import Summary

_STYLES = {"finished": "green", "running": "cyan", "diverged": "yellow", "failed": "red", "damaged": "red"}


def list_runs(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the runs.")] = Path("runs"),
    experiment: Annotated[str | None, typer.Option(help="Only runs of this experiment.")] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only runs in this state: finished, diverged, running, stopped, failed or damaged."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the runs as JSON, for programs.")] = False,
) -> None:
    """List the runs of a folder, and the mean over seeds of each method.

    Runs are sorted by experiment and score. To resume a stopped or failed run, repeat its aida train command.
    """
    from typing import get_args

    from aida_lab.cli.means import draw_means, means_of, without_seed
    from aida_lab.runs.files import StoreError, json_text
    from aida_lab.runs.store import State, scan
    from aida_lab.runs.summary import summary_of

    if state is not None and state not in get_args(State):
        fail(f"--state {state!r} is none of {', '.join(get_args(State))}")
    require_runs([out])
    try:
        records = scan(out)
    except StoreError as error:
        fail(str(error))
    if experiment is not None:
        known = sorted({each.spec.experiment for each in records if each.spec})
        if experiment not in known:
            fail(f"no run of {experiment!r} in {out}; there are runs of {', '.join(known) or 'nothing'}")
        records = [each for each in records if each.spec and each.spec.experiment == experiment]
    runs = [(record, summary_of(record)) for record in records]
    means = means_of(runs)
    places = {mean.spec.key: place for place, mean in enumerate(means)}

    def place(record: RunRecord) -> tuple[int, int]:
        spec = record.spec
        return (places[without_seed(spec).key], spec.seed) if spec else (len(places), 0)

    runs.sort(key=lambda run: place(run[0]))
    found = [_described(*run) for run in runs if state in (None, run[0].state)]
    if as_json:
        typer.echo(json_text(found, indent=2))
        return
    _draw(found)
    draw_means(means)
    console().print(f"{len(found)} runs in {out}", style="dim", soft_wrap=True)


def _draw(found: list[dict[str, Any]]) -> None:
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


def _described(record: RunRecord, measured: Summary) -> dict[str, Any]:
    """A run as one flat object. Unknown values are None or empty."""
    from aida_lab.progress.labels import differing
    from aida_lab.runs.files import in_json

    spec = record.spec
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
    """Time since the run's folder changed: ``40 s``, ``12 min``, ``3 h``, ``5 d``."""
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def collect_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="Folder for the records; created if missing.")] = Path("results"),
) -> None:
    """Collect the records of finished runs in one compressed file per experiment: OUT/EXPERIMENT.tar.xz.

    A record is the spec, environment, curve, stepsizes and result of a run, without weights. aida runs, report and
    stepsizes read OUT like a folder of runs; tar xf gives the folders. Records that are already there are kept, so
    you can collect from several machines one after another.
    """
    from aida_lab.runs.collecting import collect
    from aida_lab.runs.files import StoreError, one_line

    require_runs(runs)
    require_writable(out)
    try:
        found = collect(runs, out)
    except StoreError as error:
        fail(str(error))
    say(f"added {len(found.added)} runs to {out}, {found.size / 1e6:.1f} MB; {found.known} were already there")
    for folder, reason in found.left:
        say(one_line(f"left out: {folder} is {reason}", 1000), err=True)
