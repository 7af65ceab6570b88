"""Searching: the paper's protocol for one optimizer or for all of a table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from aida_lab.cli.printing import console, fail, say, say_written, table
from aida_lab.cli.stopping import announced_stop, given_up_when_hurried

if TYPE_CHECKING:
    from aida_lab.search.findings import Findings, Spread
    from aida_lab.search.plan import Plan
    from aida_lab.search.stage import Row
    from aida_lab.spec import PaperFigure
    from aida_lab.workers.jobs import Jobs


def search(
    experiment: Annotated[
        str | None, typer.Argument(metavar="EXPERIMENT", help="What to search; aida experiments lists them.")
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="As in aida train. May be given several times.", show_default="aida"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every optimizer of the experiment's table.")] = False,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V1,V2,..", help="Search this set, instead of the paper's or beside it."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Fix a hyper-parameter, which is then not searched."),
    ] = None,
    search_seed: Annotated[int, typer.Option(min=0, help="The seed of every search run.")] = 0,
    seeds: Annotated[str, typer.Option(help="Of the repetitions at the best: 0,1,2 or 0-4.")] = "0,1,2",
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Of a search run, for a shortened search.", show_default="as the experiment has it"),
    ] = None,
    repeat_epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Of a repetition.", show_default="as the experiment has it"),
    ] = None,
    by: Annotated[str, typer.Option(help="Which epoch counts: best, as in the paper's code, or last.")] = "best",
    sampler: Annotated[
        str, typer.Option(help="grid: the values of the sets; tpe: what lies between their ends, as Optuna proposes.")
    ] = "grid",
    trials: Annotated[int, typer.Option(min=1, help="Configurations that tpe tries.")] = 20,
    pruner: Annotated[str, typer.Option(help="none, or median: give up what is worse than most by then.")] = "none",
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="postgresql://USER@HOST/DATABASE for workers on several machines; a password is better kept in "
            "PGPASSWORD or ~/.pgpass.",
            show_default="search.db in --out, an SQLite file",
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a worker of which nothing is heard counts as dead.")
    ] = 60.0,
    precision: Precision = None,
    variant: Variant = None,
    jobs: JobCount = 1,
    out: RunsFolder = Path("runs"),
    data: DataRoot = None,
    device: Device = None,
    limit: Limit = None,
    warmup: Warmup = 0,
    deterministic: Deterministic = False,
    compiled: Compiled = None,
    graph: Graph = None,
    inception: InceptionFile = None,
    workers: DecodingWorkers = 4,
    checkpoint_seconds: CheckpointSeconds = 30.0,
) -> None:
    """Search an optimizer's best configuration, then repeat it.

    The paper's protocol: every configuration of the optimizer's search set is trained once, the best by the
    experiment's metric is repeated. The same command on other machines, or again, works on the same search:
    what was measured is not measured again, and what a killed worker left is taken up. Ctrl-C saves first.
    Every run is an ordinary one, which aida runs and aida report see.
    """
    from aida_lab.parsing import parse_seeds, parse_settings
    from aida_lab.request import Order
    from aida_lab.runs.store import StoreError
    from aida_lab.search import pruning
    from aida_lab.search.plan import plan_of
    from aida_lab.search.space import methods_of, parse_sets
    from aida_lab.search.storage import missing_packages
    from aida_lab.training.options import Options
    from aida_lab.workers.attempt import RUNNER
    from aida_lab.workers.jobs import Jobs

    if missing := missing_packages(storage):
        fail(missing)
    chosen = chosen_experiment(experiment, "search")
    where = chosen_device(device)
    if every and optimizer:
        fail("--all is every optimizer, --optimizer some of them; use one of the two")
    _check("--by", by, ("best", "last"))
    _check("--sampler", sampler, ("grid", "tpe"))
    _check("--pruner", pruner, ("none", "median"))
    names = methods_of(chosen) if every else tuple(dict.fromkeys(optimizer or ["aida"]))
    with words_checked():
        order = Order(
            chosen,
            given=parse_settings(settings or []),
            seeds=(search_seed,),
            device=where,
            epochs=epochs,
            precision=precision,
            variant=chosen_variant(chosen, variant, inception),
            compiled=compiled,
            deterministic=deterministic,
            limit=limit,
            warmup=warmup,
        )
        plans = [
            plan_of(
                order,
                name,
                parse_sets(over or []),
                seeds=parse_seeds(seeds),
                repeat_epochs=repeat_epochs,
                by=by,
                sampler=sampler,
                trials=trials,
                pruner=pruner,
            )
            for name in names
        ]
    require_data(chosen.reads(plans[0].base.variant), data)
    options = Options(
        device=where,
        data_root=data,
        inception=inception,
        workers=workers,
        graph=graph,
        checkpoint_seconds=checkpoint_seconds,
    )
    queue = Jobs(out, options, jobs, RUNNER if pruner == "none" else pruning.RUNNER)
    found, stopped_by = _carry_out(plans, queue, storage, grace)
    for each in found:
        _report(each)
    if len(found) > 1:
        _summarise(found)
    try:
        say_written([each.write(out) for each in found])
    except StoreError as error:
        fail(str(error))
    if stopped_by:
        raise typer.Exit(128 + stopped_by)
    if not all(each.complete for each in found):
        raise typer.Exit(1)


def _carry_out(plans: Sequence[Plan], jobs: Jobs, address: str | None, grace: float) -> tuple[list[Findings], int]:
    """Search them all; returns also the signal that stopped it, 0 for none."""
    from aida_lab.events import Event
    from aida_lab.progress.display import shown
    from aida_lab.progress.status import Board
    from aida_lab.search.protocol import Protocol, Search
    from aida_lab.search.storage import Storage, StorageError, sqlite_in
    from aida_lab.search.trials import Register

    board = Board()
    with announced_stop() as stop:
        try:
            with shown(console(), board) as listen:
                storage = Storage(
                    address or sqlite_in(jobs.out),
                    note=lambda text: listen(Event("note", "", text=text)),
                    hurried=lambda: stop.asked,
                )
                with closing(Register(storage, grace)) as register:
                    searches = [Search(plan, register) for plan in plans]
                    with given_up_when_hurried(stop):
                        Protocol(searches, jobs, listen, board.expect, stop).carry_out()
                    found = [search.findings() for search in searches]
        except StorageError as error:
            say(str(error), err=True)
            raise typer.Exit(1) from None
    return found, stop.signal


def _report(found: Findings) -> None:
    """Every configuration, the best marked, and the repetitions there."""
    from aida_lab.parsing import as_typed
    from aida_lab.progress.labels import value_in_words

    plan = found.plan
    title = f"{plan.method} on {plan.base.experiment}: {plan.metric.title}, by the {plan.by} epoch"
    if plan.shortened:
        title += f"; search shortened to {plan.base.epochs} of {plan.repetition(plan.base, 0).epochs} epochs"
    console().print(title, markup=False, soft_wrap=True)
    drawn = table("", "", *plan.space.sets, "state", "best (epoch)", "last", "folder", dense=True)
    for row in found.rows:
        mark = "*" if row is found.best else ""
        drawn.add_row(mark, *map(value_in_words, row.configuration.values()), *_measures(row))
    console().print(drawn)
    for problem in found.problems():
        say(problem, err=True)
    if found.best is None:
        left = sum(row.measured is None for row in found.rows)
        said = f"{left} not measured yet" if left else "none ended well: each diverged or was pruned"
        say(f"no best configuration of {plan.method}: of {plan.wanted} configurations {said}")
        return
    drawn = table(f"{plan.method} at the best", "seed", "state", "best (epoch)", "last", "folder", dense=True)
    for row in found.repetitions:
        drawn.add_row(str(row.spec.seed), *_measures(row))
    console().print(drawn)
    lost = f", {found.diverged} diverged" if found.diverged else ""
    for name, spread in (("best", found.spread("best")), ("last", found.spread("last"))):
        if spread is not None:
            say(f"{plan.method}, {name} epoch: {_mean_in_words(spread)} (n = {spread.n}{lost})")
    if found.diverged and (following := found.next_best) is not None:
        instead = " ".join(f"--set {text}" for text in as_typed(following.configuration))
        say(f"the best did not hold in its repetitions; {instead} repeats the next best instead")


def _summarise(found: Sequence[Findings]) -> None:
    """All searches of the command, a line each, beside the paper."""
    from aida_lab.progress.labels import settings_in_words
    from aida_lab.report import groups

    plan = found[0].plan
    experiment = plan.order.experiment
    departures = groups.Setup.of(plan.repetition(plan.base, 0)).departures(experiment)
    figures = {} if departures else experiment.figures(plan.base.variant)
    title = ", ".join([experiment.title, *departures])
    if any(each.plan.shortened for each in found):
        title += f"; searched with {min(each.plan.base.epochs for each in found)} epochs"
    drawn = table(title, "method", "best values", "best epoch", "last epoch", "n", "paper", dense=True)
    for each in found:
        best, figure = each.spread("best"), figures.get(each.plan.method)
        drawn.add_row(
            each.plan.method,
            settings_in_words(each.best.configuration) if each.best else "",
            _mean_in_words(best),
            _mean_in_words(each.spread("last")),
            str(best.n) if best else "",
            _mean_in_words(figure),
        )
    console().print(drawn)


def _measures(row: Row) -> list[Any]:
    """State, best, last and folder of a configuration or a repetition."""
    from rich.text import Text

    from aida_lab.progress.status import STYLES, in_words
    from aida_lab.search.liveness import this_worker

    measured = row.measured
    if measured is None:
        state = f"{row.state} ({row.problem})" if row.state == "running" else row.state
        return [Text(state, style=STYLES.get(row.state, "")), "", "", ""]
    best = f"{in_words(measured.best)} ({measured.best_epoch})" if measured.best is not None else ""
    here = measured.host == this_worker()["host"]
    folder = measured.folder if here else f"{measured.host}:{measured.folder}"
    return [Text(row.state, style=STYLES.get(row.state, "")), best, in_words(measured.last), folder]


def _mean_in_words(found: Spread | PaperFigure | None) -> str:
    from aida_lab.progress.status import in_words

    if found is None:
        return ""
    return in_words(found.mean) + ("" if found.std is None else f" ± {found.std:.2g}")


def _check(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        fail(f"{option} {value!r} is none of {', '.join(known)}")
