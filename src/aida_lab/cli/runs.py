"""``aida runs`` and ``aida collect``: what is in a folder of runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aida_lab.cli.choices import require_known, require_runs, require_writable
from aida_lab.cli.printing import best_in_words, console, fail, mean_in_words, say, state_in_colour, table
from aida_lab.runs.files import in_json, json_text, one_line

if TYPE_CHECKING:
    from aida_lab.report.collect import Run
    from aida_lab.report.groups import Configuration
    from aida_lab.runs.records import RunRecord


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

    from aida_lab.experiments import experiments
    from aida_lab.report.collect import run_of
    from aida_lab.runs.records import RunState, scan

    require_known("--state", state, get_args(RunState))
    require_runs([out])
    records = scan(out)
    if experiment is not None:
        known = sorted({each.spec.experiment for each in records if each.spec})
        if experiment not in known:
            fail(f"no run of {experiment!r} in {out}; there are runs of {', '.join(known) or 'nothing'}")
        records = [each for each in records if each.spec and each.spec.experiment == experiment]
    runs = {each.path: run_of(each, experiments()) for each in records if each.spec}
    means = means_of(runs.values())
    places = {
        run.folder: (place, run.spec.seed) for place, mean in enumerate(means) for run in (*mean.runs, *mean.repeats)
    }
    records.sort(key=lambda each: places.get(each.path, (len(means), 0)))
    found = [_described(each, runs.get(each.path)) for each in records if state in (None, each.state)]
    if as_json:
        typer.echo(json_text(found, indent=2))
        return
    _draw(found)
    draw_means(means)
    console().print(f"{len(found)} runs in {out}", style="dim", soft_wrap=True)


def means_of(runs: Iterable[Run]) -> list[Configuration]:
    """The configurations of the runs, ordered by experiment, the best mean first."""
    from aida_lab.report.groups import configurations

    def place(each: Configuration) -> tuple[str, str, bool, float]:
        best = each.mean_std("best")
        sign = -1 if any(run.better == "higher" for run in each.counted) else 1
        return each.spec.experiment, each.spec.variant, best is None, sign * best.mean if best else 0.0

    return sorted(configurations(runs), key=place)


def draw_means(means: Sequence[Configuration]) -> None:
    """Print a table with one row per configuration if one has a finished run. Empty columns are left out."""
    from aida_lab.progress.labels import labels

    if not any(mean.counted for mean in means):
        return
    names = {mean.spec.experiment for mean in means}
    named: dict[str, str] = {}
    for name in names:
        named |= labels(mean.spec for mean in means if mean.spec.experiment == name)
    excluded = [Counter(run.state for run in mean.runs if run.state != "finished") for mean in means]
    columns = {
        "experiment": [mean.spec.experiment if len(names) > 1 else "" for mean in means],
        "method": [named[mean.spec.key].removesuffix(" seed 0") for mean in means],
        "metric": [next(filter(None, (run.so_far[0] for run in mean.runs)), "") for mean in means],
        "best epoch: mean ± std": [mean_in_words(mean.mean_std("best")) for mean in means],
        "last epoch: mean ± std": [mean_in_words(mean.mean_std("last")) for mean in means],
        "n": [str(len(mean.counted)) for mean in means],
        "not in the mean": [", ".join(f"{n} {state}" for state, n in states.items()) for states in excluded],
    }
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    console().print(table("mean over seeds", list(columns), zip(*columns.values(), strict=True), dense=True))


def _draw(found: list[dict[str, Any]]) -> None:
    from aida_lab.progress.labels import settings_in_words
    from aida_lab.progress.status import age_in_words, in_words

    heads = ("run", "experiment", "method", "seed", "state", "best (epoch)", "last", "epoch", "age")
    drawn = table("", heads, dense=True)
    drawn.columns[0].no_wrap = True
    for run in found:
        best = best_in_words(run["best"], run["best_epoch"])
        drawn.add_row(
            one_line(run["key"]),
            run["experiment"],
            f"{run['method']} {settings_in_words(run['differing'])}".strip(),
            str(run["seed"]) if run["seed"] is not None else "",
            state_in_colour(run["state"]),
            f"{run['metric']} {best}" if best else "",
            in_words(run["last"]),
            f"{run['epoch']}/{run['epochs']}" if run["epochs"] else "",
            age_in_words(run["age"]),
        )
    console().print(drawn)
    for run in found:
        if run["problem"]:
            said = one_line(f"{run['key']} {run['state']}: {run['problem']}", 1000)
            console().print(said, style="red", soft_wrap=True)


def _described(record: RunRecord, run: Run | None) -> dict[str, Any]:
    """A run as one flat object. Unknown values are None or empty."""
    from aida_lab.progress.labels import differing

    spec = record.spec
    metric, best, best_epoch, last = run.so_far if run else ("", None, None, None)
    texts = ("experiment", "variant", "optimizer", "method", "precision")
    return {
        "key": record.path.name,
        **{name: getattr(spec, name) if spec else "" for name in texts},
        "hyper": in_json(dict(spec.hyper)) if spec else {},
        "differing": in_json(differing(spec)) if spec else {},
        "seed": spec.seed if spec else None,
        "state": record.state,
        "metric": metric,
        "best": best,
        "best_epoch": best_epoch,
        "last": last,
        "seconds": run.median_seconds if run else None,
        "epoch": record.rows,
        "epochs": spec.epochs if spec else None,
        "age": round(max(time.time() - record.changed, 0.0), 1),
        "folder": str(record.path),
        "problem": record.problem,
    }


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

    require_runs(runs)
    require_writable(out)
    found = collect(runs, out)
    say(f"added {len(found.added)} runs to {out}, {found.size / 1e6:.1f} MB; {found.known} were already there")
    for folder, reason in found.left:
        say(one_line(f"left out: {folder} is {reason}", 1000), err=True)
