"""``aida train`` and ``aida experiments``."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from aida_lab.cli import choices, printing
from aida_lab.cli.options import DataRoot, Epochs, Name, RunOptions, Settings, takes
from aida_lab.cli.printing import console, fail, load_torch, prints, say, table

if TYPE_CHECKING:
    from aida_lab.spec import RunSpec
    from aida_lab.training.options import Options
    from aida_lab.workers.attempt import Outcome

#: The value of ``--probe`` without a number: as often as the experiment proposes.
_AS_PROPOSED = 0


class TrainCommand(TyperCommand):
    """Accepts ``--probe`` with or without a number."""

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

    rows = []
    for each in experiments().values():
        metrics, reads = list(each.metrics.values()), [f"{name} ({_data_in_words(name, data)})" for name in each.data]
        variants = each.variants if len(metrics) > 1 else ()
        numbers = (f"{each.parameters:,}", ", ".join(reads), str(each.epochs))
        rows.append((each.name, each.title, *numbers, metrics[0].title, ", ".join(variants)))
    heads = ("name", "what", "parameters", "data", "epochs", "metric", "variants")
    console().print(table("", heads, rows))
    console().print("To train one: aida train NAME --optimizer aida --seeds 0,1,2", style="dim")


@takes(RunOptions)
def train(
    experiment: Name = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that aida list shows, aida-k1 for Aida with one projection, module:Class such as "
            "torch.optim:NAdam, or two as first+rest, the first for hidden matrices. Repeat the option for several.",
            show_default="aida",
        ),
    ] = None,
    settings: Settings = None,
    seeds: Annotated[str, typer.Option(help="Seeds, one run per seed: 0,1,2 or 0-4.")] = "0",
    epochs: Epochs = None,
    probe: Annotated[
        int | None, typer.Option(min=0, metavar="[N]", help="Record adaptive stepsizes every N steps.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="fsdp: the processes that torchrun starts train each run together, and each holds a part of the model "
            "and of the optimizer's state (FSDP2)."
        ),
    ] = None,
    log: Annotated[str | None, typer.Option(help="tensorboard: also write event files into each run's folder.")] = None,
    *,
    options: RunOptions,
) -> None:
    """Train an experiment, one run per optimizer and seed.

    Each run is a folder in --out, named by the hash of all that decides its numbers. If you repeat the command,
    finished runs are skipped and stopped or killed runs resume. A run is trained again if its module:Class or
    its data changed. Ctrl-C saves before it stops.
    """
    load_torch()
    from aida_lab.parsing import parse_seeds, parse_values

    chosen = choices.chosen_experiment(experiment, "train")
    jobs, out = options.jobs, options.out
    if jobs > 1 and (shard or "WORLD_SIZE" in os.environ):
        fail("--jobs trains runs in parallel, torchrun trains one run on several GPUs; use one of the two")
    choices.require_known("--shard", shard, ("fsdp",))
    choices.require_known("--log", log, ("tensorboard",))
    if log and not find_spec("tensorboard"):
        fail("--log tensorboard needs TensorBoard: pip install '.[tensorboard]' in a clone")
    request = options.request(
        chosen,
        optimizers=tuple(optimizer or ["aida"]),
        given=parse_values(settings or []),
        seeds=parse_seeds(seeds),
        epochs=epochs,
        probe_every=0 if probe is None else probe or None,
    )
    specs = request.specs()
    choices.require_data(chosen.reads(specs[0].variant), options.data)
    choices.require_writable(out)
    outcomes, stopped_by = work(specs, out, options.training(tensorboard=log is not None, shard=shard), jobs)
    if prints():
        _report(specs, outcomes, out, jobs)
    leave(specs, outcomes, stopped_by)


def work(specs: list[RunSpec], out: Path, options: Options, jobs: int) -> tuple[list[Outcome], int]:
    """Train all runs. Returns their outcomes and the signal that stopped them, 0 for none."""
    from aida_lab.progress.status import Board
    from aida_lab.workers.jobs import Jobs

    board = Board()
    board.expect(specs)
    outcomes: list[Outcome] = []
    with printing.supervised(board) as (listen, stop):
        outcomes.extend(Jobs(out, options, jobs).work_all(specs, listen, stop))
    return outcomes, stop.signal


def leave(specs: list[RunSpec], outcomes: list[Outcome], stopped_by: int) -> None:
    """Say which runs are not done, and exit unless all are."""
    from aida_lab.progress.labels import labels

    named, rank = labels(specs), "" if prints() else f"rank {os.environ['RANK']}: "
    for each in outcomes:
        if each.state in ("failed", "busy"):
            say(f"{rank}{named[each.key]} {each.state}: {each.error}", err=True)
    if prints():
        unfinished = len(specs) - sum(each.done for each in outcomes)
        if unfinished:
            say(f"{unfinished} of {len(specs)} runs are not finished. Next: the same command again; it resumes them")
    if stopped_by:
        raise typer.Exit(128 + stopped_by)
    if any(not each.done for each in outcomes):
        raise typer.Exit(1)


def _report(specs: list[RunSpec], outcomes: list[Outcome], out: Path, jobs: int) -> None:
    """Print a table of the runs, the mean per method, and the next command."""
    from aida_lab.cli.runs import draw_means, means_of
    from aida_lab.experiments import experiments
    from aida_lab.progress.labels import labels
    from aida_lab.progress.status import in_words
    from aida_lab.report.collect import run_of
    from aida_lab.runs.records import read_run

    named = labels(specs)
    states = {each.key: each.state for each in outcomes}
    # runs that share a machine slow each other down: their times say nothing about the method
    timed = ["s per epoch"] if jobs == 1 else []
    runs, rows = [], []
    for spec in specs:
        folder = out / spec.key
        if spec.key not in states or not folder.is_dir():  # stopped before it started
            continue
        run = run_of(replace(read_run(folder), spec=spec), experiments())
        runs.append(run)
        _, best, best_epoch, last = run.so_far
        state, best_known = printing.state_in_colour(states[spec.key]), printing.best_in_words(best, best_epoch)
        seconds = [in_words(run.median_seconds)] if timed else []
        rows.append((named[spec.key], state, best_known, in_words(last), *seconds, str(folder)))
    if not runs:
        return
    console().print(table("", ("run", "state", "best (epoch)", "last", *timed, "folder"), rows, dense=True))
    means = means_of(runs)
    draw_means(means)
    if len(outcomes) == len(specs) and all(each.done for each in outcomes):
        place, methods = shlex.quote(str(out)), list(dict.fromkeys(mean.method for mean in means))
        compare = f"aida compare {methods[0]} {methods[1]} {place}, or " if len(methods) > 1 else ""
        say(f"Next: {compare}aida report {place}")


def _data_in_words(name: str, root: Path | None) -> str:
    from aida_lab.data import DataError
    from aida_lab.data.local import require
    from aida_lab.data.sets import find

    wanted = find(name)
    if wanted.embedded:
        return f"in {wanted.part_of}"
    try:
        require(wanted, root)
    except DataError:
        return "missing: " + (f"aida data get {name}" if wanted.can_be_downloaded else f"aida data import {name} PATH")
    return "there"
