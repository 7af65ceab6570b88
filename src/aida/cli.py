"""The command line. Each subcommand imports what it needs, so that ``aida --help`` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    print("the command line needs typer and rich: pip install aida-optim[lab]", file=sys.stderr)
    raise SystemExit(1) from None

if TYPE_CHECKING:
    from aida.stepsizes.sinks import StepsizeLog

#: What the extra ``lab`` brings; a command that misses one of them says so in one line.
_LAB = ("rich", "numpy", "scipy", "sklearn", "threadpoolctl", "matplotlib")


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"no command is called {args[0]!r}; known are {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="aida",
    cls=_Commands,
    help="Aida: AdaBelief with a narrower range of adaptive stepsizes, and the optimizers it is compared with.",
    no_args_is_help=True,
    add_completion=False,
)

data_app = typer.Typer(cls=_Commands, help="Bring the data sets of the experiments, and see what is there.")
app.add_typer(data_app, name="data", no_args_is_help=True)

_DataRoot = Annotated[
    Path | None, typer.Option("--data", help="The data root; else AIDA_DATA, else aida in the user's cache.")
]
_SetName = Annotated[str, typer.Argument(metavar="NAME", help="A data set; aida data list shows them.")]


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


def _print_version(wanted: bool) -> None:
    if wanted:
        from aida.version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the subcommand."""


@app.command("list")
def list_optimizers(
    names: Annotated[
        list[str] | None, typer.Argument(help="Optimizers to describe in full, such as: aida adabelief-star.")
    ] = None,
) -> None:
    """List the optimizers, with their update rules and papers.

    Any of them can be built from Python: aida.catalog.find("adabelief").build(model.parameters(), lr=1e-3)
    """
    from aida.catalog import catalog

    if names:
        for entry in [_found(name) for name in names]:
            _describe(entry)
        return
    table = _table("", "name", "method", "update in one line", "paper")
    for entry in catalog().values():
        table.add_row(entry.name, entry.title, entry.rule, f"{entry.paper.authors.split(',')[0]} {entry.paper.year}")
    _console().print(table)
    _console().print("aida list NAME shows one in full: defaults, tuned values, where eps sits.", style="dim")


@app.command()
def theory(
    out: Annotated[
        Path | None, typer.Option(help="Folder for theory.png, theory.svg and theory.md; made if missing.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each convex run.")] = 1500,
) -> None:
    """Check the paper's theory on real convex problems, under a minute.

    Evaluates Theorem 1 term by term beside the measured regret of Aida and AdaBelief in logistic
    regression, counts how often its assumption on the variances holds, and shows a run that breaks it.
    docs/theory.md explains the tables.
    """
    from rich.markdown import Markdown

    from aida.theory import study

    with _console().status("minimising logistic losses and running both methods ..."):
        found = study.run(steps)
    text = study.as_markdown(found)
    _console().print(Markdown(text))
    if out is not None:
        from aida.theory.figure import draw_to

        out.mkdir(parents=True, exist_ok=True)
        (out / "theory.md").write_text(text + "\n", encoding="utf-8")
        _say_written([out / "theory.md", *draw_to(found, out)])


@app.command()
def stepsizes(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders that hold stepsizes.jsonl, or such files; several become columns side by side."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figures; made if missing.")] = Path("report"),
) -> None:
    """Draw the adaptive stepsizes of training runs, layer by layer.

    Writes stepsizes.png and .svg (means and standard deviations), and each figure of the paper whose
    methods are all among the runs. A run records its stepsizes with aida.stepsizes.StepsizeProbe.
    """
    from aida.drawing import save
    from aida.stepsizes.plots import draw, draw_paper_figures

    logs = [_read(run) for run in runs]
    table = _table("stepsizes at the last measurement", "run", "method", "step", "layers", "spread", "at the bound")
    for run, log in zip(runs, logs, strict=True):
        if log.across:
            last = log.across[-1]
            share = "" if last.at_bound is None else f"{last.at_bound:.1%}"
            table.add_row(str(run), last.method, str(last.step), str(last.layers), f"{last.spread:.3g}", share)
    _console().print(table)
    _say_written([*save(draw(logs, ("mean", "std")), out / "stepsizes"), *draw_paper_figures(logs, out)])


@data_app.command("get")
def get_data(
    name: _SetName,
    data: _DataRoot = None,
    again: Annotated[bool, typer.Option("--again", help="Fetch it even where it is there and whole.")] = False,
) -> None:
    """Fetch a data set from its official address, check it, and unpack it.

    A download that broke off goes on where it stopped.
    """
    from aida.lab.data.errors import DataError
    from aida.lab.data.fetch import get
    from aida.lab.data.progress import shown

    wanted = _known_set(name)
    try:
        with shown(_console()) as progress:
            found = get(wanted, data, again=again, progress=progress)
        _say_standing(found, data)
    except DataError as error:
        _fail(str(error))


@data_app.command("import")
def import_data(
    name: _SetName,
    path: Annotated[Path, typer.Argument(help="A folder that holds the files of the set, or its official archive.")],
    data: _DataRoot = None,
) -> None:
    """Take a data set from a local copy. ImageNet is linked to, the others are copied."""
    from aida.lab.data.errors import DataError
    from aida.lab.data.fetch import import_from

    wanted = _known_set(name)
    try:
        _say_standing(import_from(wanted, path, data), data)
    except DataError as error:
        _fail(str(error))


@data_app.command("list")
def list_data(data: _DataRoot = None) -> None:
    """Show each data set: whether it is there, where, and whether its checksums are right."""
    from aida.lab.data.local import status

    table = _table("", "name", "what", "state", "where", "remark")
    for each in status(data):
        table.add_row(each.data.name, each.data.title, each.state, each.where, each.remark)
    _console().print(table)


def _known_set(name: str) -> Any:
    from aida.lab.data.sets import find

    try:
        return find(name)
    except LookupError as error:
        _fail(str(error.args[0]))


def _say_standing(found: Any, root: Path | None) -> None:
    """Where a set is now; the sentences of Multi30k are cut into words at once where spaCy is there."""
    from importlib.util import find_spec

    typer.echo(f"{found.data.name}: {found.state}, {found.where}{'; ' if found.remark else ''}{found.remark}")
    if found.data.name == "multi30k" and find_spec("spacy"):
        from aida.lab.data.translation import multi30k

        typer.echo(f"multi30k: tokenised, {len(multi30k(root).words):,} words")


def _read(run: Path) -> StepsizeLog:
    from aida.stepsizes.sinks import read_jsonl

    path = run / "stepsizes.jsonl" if run.is_dir() else run
    if not path.exists():
        below = (found for depth in ("*", "*/*", "*/*/*") for found in Path().glob(f"{depth}/stepsizes.jsonl"))
        here = sorted({found.parent for found in below})[:20]
        known = f"; runs below this folder: {', '.join(map(str, here))}" if here else ""
        _fail(f"no stepsizes at {path}: a run is a folder with stepsizes.jsonl, or such a file{known}")
    try:
        return read_jsonl(path)
    except ValueError as error:
        _fail(str(error))


def _found(name: str) -> Any:
    from aida.catalog import find

    try:
        return find(name)
    except LookupError as error:
        _fail(str(error.args[0]))


def _describe(entry: Any) -> None:
    from torch import nn

    table = _table(f"{entry.title} ({entry.name})", "", "")
    group = entry.build([nn.Parameter(nn.init.zeros_(nn.Linear(1, 1).weight))]).param_groups[0]
    bound = entry.reading.bound(group)
    rows = {
        "update": entry.rule,
        "paper": str(entry.paper),
        "defaults": _values(entry.defaults),
        **{f"tuned for {name}": _values(values) for name, values in entry.tuned.items() if values},
        "stepsize": entry.reading.about + ("" if bound is None else f"; at most {bound:.4g} with the defaults"),
        "eps": entry.reading.eps,
        "notes": entry.notes,
    }
    for name, text in rows.items():
        table.add_row(name, text)
    _console().print(table)


def _values(values: Any) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def _say_written(paths: list[Path]) -> None:
    for path in paths:
        typer.echo(f"wrote {path}")


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)
