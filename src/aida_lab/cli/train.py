"""Training: the experiments, and runs of them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from aida_lab.cli.choices import (
    chosen_device,
    chosen_experiment,
    chosen_variant,
    require_data,
    words_checked,
)
from aida_lab.cli.options import (
    CheckpointSeconds,
    Compiled,
    DataRoot,
    DecodingWorkers,
    Deterministic,
    Device,
    Graph,
    InceptionFile,
    JobCount,
    Limit,
    Precision,
    RunsFolder,
    Variant,
    Warmup,
)
from aida_lab.cli.printing import console, fail, say, table
from aida_lab.cli.stopping import announced_stop, given_up_when_hurried

if TYPE_CHECKING:
    from aida_lab.spec import Experiment, RunSpec
    from aida_lab.training.options import Options
    from aida_lab.workers.attempt import Outcome

#: What a bare ``--probe`` becomes: as often as the experiment proposes.
_AS_PROPOSED = 0


class TrainCommand(TyperCommand):
    """Lets ``--probe`` stand alone or before a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spelled: list[str] = []
        for word, following in zip(args, [*args[1:], ""], strict=False):
            spelled.append(word)
            if word == "--probe" and not following.isdecimal():
                spelled.append(str(_AS_PROPOSED))
        return super().parse_args(ctx, spelled)


def list_experiments(data: DataRoot = None) -> None:
    """List the experiments: model, data, epochs, metric."""
    from aida_lab.experiments import experiments

    drawn = table("", "name", "what", "parameters", "data", "epochs", "metric", "variants")
    for each in experiments().values():
        metrics = list(each.metrics.values())
        drawn.add_row(
            each.name,
            each.title,
            f"{each.parameters:,}",
            ", ".join(f"{name} ({_data_in_words(name, data)})" for name in each.data),
            str(each.epochs),
            metrics[0].title,
            ", ".join(each.variants) if len(metrics) > 1 else "",
        )
    console().print(drawn)
    console().print("aida train NAME --optimizer aida --seeds 0,1,2 trains one.", style="dim")


def train(
    experiment: Annotated[
        str | None, typer.Argument(metavar="EXPERIMENT", help="What to train; aida experiments lists them.")
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            help="A name of aida list, aida-k1 for Aida with one projection, or module:Class such as "
            "torch.optim:NAdam. May be given several times.",
            show_default="aida",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A hyper-parameter, such as eps=1e-9 or betas=0.9,0.99."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="One run each: 0,1,2 or 0-4.")] = "0",
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the experiment's own number.")] = None,
    precision: Precision = None,
    variant: Variant = None,
    jobs: JobCount = 1,
    out: RunsFolder = Path("runs"),
    data: DataRoot = None,
    device: Device = None,
    limit: Limit = None,
    warmup: Warmup = 0,
    probe: Annotated[
        int | None, typer.Option(min=0, metavar="[N]", help="Record adaptive stepsizes, every N steps.")
    ] = None,
    deterministic: Deterministic = False,
    compiled: Compiled = None,
    graph: Graph = None,
    log: Annotated[str | None, typer.Option(help="tensorboard: write its files into each run's folder too.")] = None,
    inception: InceptionFile = None,
    workers: DecodingWorkers = 4,
    checkpoint_seconds: CheckpointSeconds = 30.0,
) -> None:
    """Train an experiment, once for each optimizer and seed.

    A run is a folder under --out, named by the hash of all that decides its numbers. The same command
    again skips what is finished and goes on where a run was stopped or killed. A run of a module:Class
    or of data that changed since is trained again. Ctrl-C saves first.
    """
    from aida_lab.training.options import Options

    chosen = chosen_experiment(experiment, "train")
    where = chosen_device(device)
    if jobs > 1 and "WORLD_SIZE" in os.environ:
        fail("--jobs is for runs side by side, torchrun for one run on several GPUs; use one of the two")
    _check_log(log)
    specs = _specs(
        chosen,
        settings or [],
        seeds,
        optimizers=tuple(optimizer or ["aida"]),
        device=where,
        epochs=epochs,
        precision=precision,
        variant=chosen_variant(chosen, variant, inception),
        compiled=compiled,
        deterministic=deterministic,
        probe_every=0 if probe is None else probe or None,
        limit=limit,
        warmup=warmup,
    )
    require_data(chosen.reads(specs[0].variant), data)
    options = Options(
        device=where,
        data_root=data,
        inception=inception,
        workers=workers,
        graph=graph,
        checkpoint_seconds=checkpoint_seconds,
        tensorboard=log is not None,
    )
    outcomes, stopped_by = _work(specs, out, options, jobs)
    if _speaks():
        _report(specs, outcomes, out)
    if stopped_by:
        raise typer.Exit(128 + stopped_by)
    if any(not each.done for each in outcomes):
        raise typer.Exit(1)


def _work(specs: list[RunSpec], out: Path, options: Options, jobs: int) -> tuple[list[Outcome], int]:
    """Train them all; returns also the signal that stopped it, 0 for none."""
    from aida_lab.progress.display import shown
    from aida_lab.progress.status import Board
    from aida_lab.workers.jobs import Jobs

    board = Board()
    board.expect(specs)
    outcomes: list[Outcome] = []
    display = shown(console(), board) if _speaks() else nullcontext(lambda event: None)
    with announced_stop() as stop, given_up_when_hurried(stop), display as listen:
        outcomes.extend(Jobs(out, options, jobs).work_all(specs, listen, stop))
    return outcomes, stop.signal


def _speaks() -> bool:
    """Of the processes that torchrun started for one run, the first speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def _report(specs: list[RunSpec], outcomes: list[Outcome], out: Path) -> None:
    """The small table at the end, and what went wrong."""
    from rich.text import Text

    from aida_lab.progress.labels import labels
    from aida_lab.progress.status import STYLES, in_words
    from aida_lab.runs.store import read_run
    from aida_lab.runs.summary import Summary, summary_of

    named = labels(specs)
    places = {spec.key: place for place, spec in enumerate(specs)}
    drawn = table("", "run", "state", "best (epoch)", "last", "s an epoch", "folder", dense=True)
    for each in sorted(outcomes, key=lambda outcome: places[outcome.key]):
        folder = out / each.key  # not there where a run was stopped before it began, or --out cannot be written
        found = summary_of(read_run(folder)) if folder.is_dir() else Summary()
        best = f"{in_words(found.best)} ({found.best_epoch})" if found.best is not None else ""
        state = Text(each.state, style=STYLES.get(each.state, ""))
        drawn.add_row(named[each.key], state, best, in_words(found.last), in_words(found.seconds), str(folder))
    console().print(drawn)
    left = len(specs) - len(outcomes)
    if left:
        say(f"{left} of {len(specs)} runs were not begun")
    for each in outcomes:
        if each.state in ("failed", "busy"):
            say(f"{named[each.key]} {each.state}: {each.error}", err=True)


def _check_log(log: str | None) -> None:
    from importlib.util import find_spec

    if log not in (None, "tensorboard"):
        fail(f"--log {log!r} is not known; known is tensorboard")
    if log and not find_spec("tensorboard"):
        fail("--log tensorboard needs TensorBoard: pip install aida-optim[tensorboard]")


def _specs(chosen: Experiment, settings: list[str], seeds: str, **rest: Any) -> list[RunSpec]:
    from aida_lab.parsing import parse_seeds, parse_values
    from aida_lab.request import RunRequest

    with words_checked():
        return RunRequest(chosen, given=parse_values(settings), seeds=parse_seeds(seeds), **rest).specs()


def _data_in_words(name: str, root: Path | None) -> str:
    from aida_lab.data.errors import DataError
    from aida_lab.data.local import require
    from aida_lab.data.sets import find

    wanted = find(name)
    if wanted.embedded:
        return "in the package"
    try:
        require(wanted, root)
    except DataError:
        return f"missing: aida data get {name}" if wanted.ways else f"missing: aida data import {name} PATH"
    return "there"
