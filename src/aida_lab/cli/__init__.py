"""The command line. Each subcommand imports what it needs, so that ``aida --help`` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    print("the command line needs typer and rich: pip install aida-optim[lab]", file=sys.stderr)
    raise SystemExit(1) from None

from aida_lab.cli.bench import bench_train
from aida_lab.cli.data import get_data, import_data, list_data
from aida_lab.cli.demo import demo
from aida_lab.cli.optimizers import list_optimizers, stepsizes, theory
from aida_lab.cli.report import report
from aida_lab.cli.runs import collect_runs, list_runs
from aida_lab.cli.search import search
from aida_lab.cli.train import TrainCommand, list_experiments, train

#: What the extra ``lab`` brings; a command that misses one of them says so in one line.
_LAB = ("rich", "numpy", "scipy", "sklearn", "threadpoolctl", "matplotlib", "jinja2")


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"no command is called {args[0]!r}; known are {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        from aida._version import __version__

        typer.echo(__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the subcommand."""


def _assembled() -> typer.Typer:
    """All commands, in the order of the help."""
    data = typer.Typer(cls=_Commands, help="Bring the data sets of the experiments, and see what is there.")
    data.command("get")(get_data)
    data.command("import")(import_data)
    data.command("list")(list_data)

    bench = typer.Typer(cls=_Commands, help="Measure how fast things are.")
    bench.command("train")(bench_train)

    commands = typer.Typer(
        name="aida",
        cls=_Commands,
        help="Aida: AdaBelief with a narrower range of adaptive stepsizes, and the optimizers it is compared with.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,  # a password among them
    )
    commands.callback()(_root)
    commands.command("demo")(demo)
    commands.command("list")(list_optimizers)
    commands.command("theory")(theory)
    commands.command("stepsizes")(stepsizes)
    commands.command("experiments")(list_experiments)
    commands.command("train", cls=TrainCommand)(train)
    commands.command("search")(search)
    commands.command("runs")(list_runs)
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
        print(f"this command needs {missing}: pip install aida-optim[lab]", file=sys.stderr)
        raise SystemExit(1) from None
