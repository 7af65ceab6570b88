"""The command ``aida``. Each subcommand imports what it needs, so that ``aida --help`` does not import torch."""

from __future__ import annotations

import sys
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    print("the command line needs typer and rich: pip install '.[lab]' in a clone", file=sys.stderr)
    raise SystemExit(1) from None

from aida_lab import ExplainedError
from aida_lab.cli.bench import bench_train
from aida_lab.cli.compare import compare
from aida_lab.cli.data import get_data, import_data, list_data
from aida_lab.cli.demo import demo
from aida_lab.cli.optimizers import list_optimizers
from aida_lab.cli.printing import fail
from aida_lab.cli.report import report
from aida_lab.cli.runs import collect_runs, list_runs
from aida_lab.cli.search import search
from aida_lab.cli.stepsizes import stepsizes
from aida_lab.cli.theory import theory
from aida_lab.cli.train import TrainCommand, list_experiments, train
from aida_lab.cli.tune import tune
from aida_lab.cli.watch import watch

#: Packages of the extra ``lab``. A command that misses one of them says so in one line.
_LAB = ("rich", "numpy", "scipy", "sklearn", "threadpoolctl", "matplotlib", "jinja2")


class _Commands(TyperGroup):
    """Ends a command with one line instead of a traceback if an error explains itself."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ExplainedError, LookupError) as error:
            if not isinstance(error, ExplainedError) and type(error) is not LookupError:  # such as a KeyError
                raise
            fail(str(error.args[0]))  # LookupError: an unknown optimizer, experiment or data set


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # aida._version would import torch

        typer.echo(version("aida-optim"))
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before the subcommand."""


def _assembled() -> typer.Typer:
    """All commands, in the order in which the help lists them."""
    data = typer.Typer(help="Download the data sets of the experiments and list them.")
    data.command("get")(get_data)
    data.command("import")(import_data)
    data.command("list")(list_data)

    bench = typer.Typer(help="Measure speed.")
    bench.command("train")(bench_train)

    commands = typer.Typer(
        name="aida",
        cls=_Commands,
        help="Aida: AdaBelief with a narrower range of adaptive stepsizes, and the optimizers it is compared with.",
        no_args_is_help=True,
        rich_markup_mode="markdown",  # wraps paragraphs to the terminal, and prints brackets as they are
        add_completion=False,
        pretty_exceptions_show_locals=False,  # they may contain a password
    )
    commands.callback()(_root)
    commands.command("demo")(demo)
    commands.command("list")(list_optimizers)
    commands.command("theory")(theory)
    commands.command("stepsizes")(stepsizes)
    commands.command("experiments")(list_experiments)
    commands.command("train", cls=TrainCommand)(train)
    commands.command("tune")(tune)
    commands.command("search")(search)
    commands.command("runs")(list_runs)
    commands.command("watch")(watch)
    commands.command("compare")(compare)
    commands.command("collect")(collect_runs)
    commands.command("report")(report)
    commands.add_typer(bench, name="bench", no_args_is_help=True)
    commands.add_typer(data, name="data", no_args_is_help=True)
    return commands


app = _assembled()


def main() -> None:
    """The ``aida`` command."""
    try:
        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _LAB:
            raise
        print(f"this command needs {missing}: pip install '.[lab]' in a clone", file=sys.stderr)
        raise SystemExit(1) from None
