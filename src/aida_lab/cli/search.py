"""``aida search``: the paper's search protocol, for one optimizer or for all of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aida_lab.cli import choices, printing
from aida_lab.cli.options import Name, RunOptions, takes
from aida_lab.cli.printing import console, fail, load_torch, mean_in_words, say, say_written, table
from aida_lab.events import Event

if TYPE_CHECKING:
    from aida_lab.search.findings import Findings, Row
    from aida_lab.search.plan import Plan
    from aida_lab.workers.jobs import Jobs


@takes(RunOptions)
def search(
    experiment: Name = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="As in aida train. Repeat the option for several.", show_default="aida")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Search every optimizer of the experiment's table.")] = False,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V1,V2,..", help="Values to search, instead of the paper's or in addition."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Fix a hyper-parameter; it is then not searched."),
    ] = None,
    search_seed: Annotated[int, typer.Option(min=0, help="Seed of every search run.")] = 0,
    seeds: Annotated[str, typer.Option(help="Seeds that repeat the best configuration: 0,1,2 or 0-4.")] = "0,1,2",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of a search run.", show_default="as the experiment has it")
    ] = None,
    repeat_epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of a repetition.", show_default="as the experiment has it")
    ] = None,
    by: Annotated[str, typer.Option(help="The epoch that counts: best, as in the paper's code, or last.")] = "best",
    sampler: Annotated[
        str, typer.Option(help="grid: every value; tpe: Optuna proposes values within their range.")
    ] = "grid",
    trials: Annotated[int, typer.Option(min=1, help="Number of configurations that tpe tries.")] = 20,
    pruner: Annotated[str, typer.Option(help="none, or median: stop runs below the median at an epoch.")] = "none",
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="postgresql://USER@HOST/DATABASE for workers on several machines. Keep the password in PGPASSWORD "
            "or ~/.pgpass.",
            show_default="SQLite file search.db in --out",
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=1.0, help="A worker counts as dead if it sends no heartbeat for GRACE seconds.")
    ] = 60.0,
    *,
    options: RunOptions,
) -> None:
    """Search the best configuration of an optimizer, then repeat it with several seeds.

    This is the paper's protocol: every configuration of the optimizer's search set is trained once, and the best
    one by the experiment's metric is repeated. If you repeat the command, here or on another machine with the same
    storage, it continues the same search: finished runs are kept, and runs of killed workers resume. Ctrl-C saves
    before it stops. aida runs and aida report read these runs like any others.
    """
    load_torch()
    from aida_lab.search.storage import missing_packages

    if missing := missing_packages(storage):
        fail(missing)
    from aida_lab.parsing import parse_seeds, parse_values
    from aida_lab.search.plan import plan_of
    from aida_lab.search.space import methods_of, parse_sets
    from aida_lab.workers.jobs import Jobs

    chosen = choices.chosen_experiment(experiment, "search")
    if every and optimizer:
        fail("--all selects every optimizer, --optimizer some of them; use one of the two")
    choices.require_known("--by", by, ("best", "last"))
    choices.require_known("--sampler", sampler, ("grid", "tpe"))
    choices.require_known("--pruner", pruner, ("none", "median"))
    names = methods_of(chosen) if every else tuple(dict.fromkeys(optimizer or ["aida"]))
    request = options.request(chosen, given=parse_values(settings or []), seeds=(search_seed,), epochs=epochs)
    protocol = {"repeat_epochs": repeat_epochs, "by": by, "sampler": sampler, "trials": trials, "pruner": pruner}
    plans = [plan_of(request, name, parse_sets(over or []), seeds=parse_seeds(seeds), **protocol) for name in names]
    choices.require_data(chosen.reads(plans[0].base.variant), options.data)
    choices.require_writable(options.out)
    found, stopped_by = _carry_out(plans, Jobs(options.out, options.training(), options.jobs), storage, grace)
    for each in found:
        _report(each)
    if len(found) > 1:
        _summarise(found)
    say_written([each.write(options.out) for each in found])
    if stopped_by:
        raise typer.Exit(128 + stopped_by)
    if not all(each.complete for each in found):
        raise typer.Exit(1)


def _carry_out(plans: Sequence[Plan], jobs: Jobs, address: str | None, grace: float) -> tuple[list[Findings], int]:
    """Carry out all searches. Returns their findings and the signal that stopped them, 0 for none."""
    from aida_lab.progress.status import Board
    from aida_lab.search.loop import Search, SearchLoop
    from aida_lab.search.storage import Storage, StorageError, sqlite_in
    from aida_lab.search.trials import Studies

    board = Board()
    searches: list[Search] = []
    try:
        with printing.supervised(board) as (listen, stop):
            storage = Storage(
                address or sqlite_in(jobs.out),
                note=lambda text: listen(Event("note", "", text=text)),
                cancelled=lambda: stop.asked,
            )
            with closing(Studies(storage, grace)) as studies:
                searches += [Search(plan, studies) for plan in plans]
                SearchLoop(searches, jobs, listen, board.expect, stop).run()
        return [search.findings() for search in searches], stop.signal
    except StorageError as error:
        say(str(error), err=True)
        raise typer.Exit(1) from None


def _report(found: Findings) -> None:
    """Print every configuration, the best marked, and the repetitions of the best."""
    from aida_lab.parsing import as_assignments
    from aida_lab.progress.labels import value_in_words

    plan = found.plan
    title = f"{plan.method} on {plan.base.experiment}: {plan.metric.title}, by the {plan.by} epoch"
    if plan.shortened:
        title += f"; search shortened to {plan.base.epochs} of {plan.repetition(plan.base, 0).epochs} epochs"
    console().print(title, markup=False, soft_wrap=True)
    rows = [
        ("*" if row is found.best else "", *map(value_in_words, row.params.values()), *_measures(row))
        for row in found.rows
    ]
    heads = ("state", "best (epoch)", "last", "folder")
    console().print(table("", ("", *plan.space.sets, *heads), rows, dense=True))
    for problem in found.problems():
        say(problem, err=True)
    if found.best is None:
        left = sum(row.measured is None for row in found.rows)
        said = f"{left} not measured yet" if left else "none finished: each diverged or was pruned"
        say(f"no best configuration of {plan.method}: of {plan.wanted} configurations {said}")
        return
    repeated = ((str(row.spec.seed), *_measures(row)) for row in found.repetitions)
    console().print(table(f"{plan.method}, best configuration", ("seed", *heads), repeated, dense=True))
    lost = f", {found.diverged} diverged" if found.diverged else ""
    for name, spread in (("best", found.spread("best")), ("last", found.spread("last"))):
        if spread is not None:
            say(f"{plan.method}, {name} epoch: {mean_in_words(spread)} (n = {spread.n}{lost})")
    if found.diverged and (following := found.next_best) is not None:
        instead = " ".join(f"--set {text}" for text in as_assignments(following.params))
        say(f"the best configuration did not hold in its repetitions; {instead} repeats the next best instead")


def _summarise(found: Sequence[Findings]) -> None:
    """Print one line per search, next to the paper's figure."""
    from aida_lab.progress.labels import settings_in_words
    from aida_lab.report import groups

    plan = found[0].plan
    experiment = plan.request.experiment
    departures = groups.Setup.of(plan.repetition(plan.base, 0)).departures(experiment)
    figures = {} if departures else experiment.paper_results(plan.base.variant)
    title = ", ".join([experiment.title, *departures])
    if any(each.plan.shortened for each in found):
        title += f"; searched with {min(each.plan.base.epochs for each in found)} epochs"
    rows = []
    for each in found:
        best, last, figure = each.spread("best"), each.spread("last"), figures.get(each.plan.method)
        values = settings_in_words(each.best.params) if each.best else ""
        means = (mean_in_words(best), mean_in_words(last), str(best.n) if best else "", mean_in_words(figure))
        rows.append((each.plan.method, values, *means))
    heads = ("method", "best values", "best epoch", "last epoch", "n", "paper")
    console().print(table(title, heads, rows, dense=True))


def _measures(row: Row) -> list[Any]:
    """State, best, last and folder of a run."""
    from aida_lab.progress.status import in_words
    from aida_lab.search.liveness import this_worker

    measured = row.measured
    if measured is None:
        text = f"{row.state} ({row.problem})" if row.state == "running" else row.state
        return [printing.state_in_colour(row.state, text), "", "", ""]
    here = measured.host == this_worker()["host"]
    folder = measured.folder if here else f"{measured.host}:{measured.folder}"
    best = printing.best_in_words(measured.best, measured.best_epoch)
    return [printing.state_in_colour(row.state), best, in_words(measured.last), folder]
