"""``aida tune``: tune every method alike, then repeat each at its best learning rate with fresh seeds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from aida_lab.cli import choices
from aida_lab.cli.options import Epochs, Name, RunOptions, Settings, takes
from aida_lab.cli.printing import console, fail, load_torch, mean_in_words, say, supervised, table
from aida_lab.cli.train import leave

if TYPE_CHECKING:
    from aida_lab.tuning import Tuned


@takes(RunOptions)
def tune(
    experiment: Name = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            help="As in aida train, with values of its own after colons: aida:eps=1e-16:projections=1. "
            "Each is a method with its own grid. Repeat the option for several.",
            show_default="aida",
        ),
    ] = None,
    settings: Settings = None,
    lrs: Annotated[
        str | None,
        typer.Option(
            metavar="LR1,LR2,..",
            help="The grid of every method: six learning rates or more.",
            show_default="seven, √10 apart, around each method's own",
        ),
    ] = None,
    refine: Annotated[
        bool,
        typer.Option("--refine", help="Also try the learning rates between the best one and its neighbours."),
    ] = False,
    tuning_seed: Annotated[int, typer.Option(min=0, help="Seed of the grid's runs.")] = 0,
    seeds: Annotated[str, typer.Option(help="Fresh seeds, which repeat each method's best learning rate.")] = "1-5",
    epochs: Epochs = None,
    *,
    options: RunOptions,
) -> None:
    """Tune every method with the same budget, then compare them with fresh seeds.

    Each method gets a grid of learning rates with one seed. If its best run is at the edge of the grid, the grid
    grows beyond that edge, one run at a time, and the table counts these runs. With --refine two more learning rates
    follow, next to the best one. Then each method is repeated with fresh seeds at its best learning rate. A run's
    number is its best epoch; diverged runs count as the worst. If you repeat the command, finished runs are kept and
    stopped or killed runs resume, with the same result.
    """
    load_torch()
    from aida_lab.parsing import parse_seeds, parse_values
    from aida_lab.progress.status import Board
    from aida_lab.tuning import Protocol, method_of, parse_lrs
    from aida_lab.workers.jobs import Jobs

    chosen = choices.chosen_experiment(experiment, "tune")
    fresh = parse_seeds(seeds)
    if tuning_seed in fresh:
        fail(f"--seeds {seeds} contains the tuning seed {tuning_seed}, which chose the learning rate; use others")
    request = options.request(chosen, given=parse_values(settings or []), seeds=(tuning_seed,), epochs=epochs)
    grid = parse_lrs(lrs) if lrs is not None else ()
    methods = [method_of(each, request, grid, fresh, refine=refine) for each in dict.fromkeys(optimizer or ["aida"])]
    choices.require_data(chosen.reads(methods[0].base.variant), options.data)
    choices.require_writable(options.out)
    protocol = Protocol(methods, Jobs(options.out, options.training(), options.jobs))
    board = Board()
    with supervised(board) as (listen, stop):
        protocol.run(listen, board.expect, stop)
    _report(protocol.results())
    specs, outcomes = protocol.specs(), list(protocol.outcomes.values())
    if all(each.done for each in outcomes) and len(outcomes) == len(specs):
        say(f"Next: aida report {shlex.quote(str(options.out))}")
    leave(specs, outcomes, stop.signal)


def _report(found: Sequence[Tuned]) -> None:
    """Print a row per method: its budget, its best learning rate, and what fresh seeds make of it."""
    from aida_lab.progress.status import in_words

    method = found[0].method
    title = f"{method.base.experiment}: {method.metric.title} at the best epoch, {method.metric.better} is better"
    heads = ("method", "runs", "learning rates", "best", f"seed {method.base.seed}", "fresh seeds", "n", "")
    rows = []
    for each in found:
        extension = len(each.places) - len(each.method.grid)
        runs = f"{len(each.method.grid)}{f' + {extension}' if extension else ''} + {len(each.method.seeds)}"
        rates = f"{each.method.lr(each.places[0]):g} to {each.method.lr(each.places[-1]):g}"
        best = "" if each.best is None else f"{each.method.lr(each.best):g}"
        chosen = "" if each.best is None else in_words(each.grid[each.best].best)
        n = str(each.mean.n) if each.mean else ""
        rows.append((each.name, runs, rates, best, chosen, mean_in_words(each.mean), n, _remark(each)))
    console().print(table(title, heads, rows, dense=True))
    say("runs: grid, runs beyond its edge or between its places if any, fresh seeds")


def _remark(each: Tuned) -> str:
    """What the numbers of a row leave out."""
    said = []
    if len(each.grid) < len(each.places):
        said.append(f"{len(each.places) - len(each.grid)} of the grid not finished")
    elif each.best is None:
        said.append("every run of the grid diverged")
    elif each.at_the_edge:
        said.append("best at the edge of the grid")
    if each.best is not None and len(each.fresh) < len(each.method.seeds):
        said.append(f"{len(each.method.seeds) - len(each.fresh)} fresh seeds not finished")
    for name, runs in (("grid", list(each.grid.values())), ("fresh seeds", each.fresh)):
        if diverged := sum(run.state == "diverged" for run in runs):
            said.append(f"{diverged} of the {name} diverged")
    return ", ".join(said)
