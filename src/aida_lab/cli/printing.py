"""What the commands print: text, tables, a bar while torch loads, one line per error. Rich is imported on first use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from aida_lab.runs.files import printable
from aida_lab.stopping import Stop

if TYPE_CHECKING:
    from aida_lab.events import Listener
    from aida_lab.progress.status import Board
    from aida_lab.report.statistics import MeanStd
    from aida_lab.spec import PaperResult

#: Columns of a console that is not a terminal: lines in a file or a pipe need not be wrapped at 80.
_WIDE = 200


def console() -> Any:
    """A console that prints text literally: no markup, no emoji, and control characters as escapes."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        # rich renders every string with this method: printed text, cells and titles of tables
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    settings: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    found = Plain(**settings)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found = Plain(**settings, width=_WIDE)
    return found


def prints() -> bool:
    """Whether this process prints: torchrun starts several for one run, and rank 0 prints for all."""
    return os.environ.get("RANK", "0") == "0"


def load_torch() -> None:
    """Import torch, which takes seconds, under a moving bar."""
    from rich.progress import BarColumn, Progress, TextColumn

    shown = console()
    silent = not (shown.is_terminal and prints())
    with Progress(TextColumn("loading torch"), BarColumn(20), console=shown, transient=True, disable=silent) as bar:
        bar.add_task("", total=None)
        import torch  # noqa: F401


def table(title: str, heads: Sequence[str], rows: Iterable[Iterable[Any]] = (), dense: bool = False) -> Any:
    """A table with these rows. ``dense`` saves space in a table with many rows and columns."""
    from rich import box
    from rich.table import Table

    drawn = Table(
        title=title or None,
        title_justify="left",
        show_header=any(heads),
        box=box.SIMPLE_HEAD if dense else box.HEAVY_HEAD,
        pad_edge=not dense,
        padding=(0, 0) if dense else (0, 1),
    )
    for head in heads:
        drawn.add_column(head, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def say(text: str, err: bool = False) -> None:
    """Print a line. Control characters, which a run's folder may contain, are printed as escapes."""

    typer.echo(printable(text), err=err)


def say_written(paths: Iterable[Path]) -> None:
    for path in paths:
        say(f"wrote {path}")


def mean_in_words(found: MeanStd | PaperResult | None) -> str:
    """``97.31 ± 0.42``; empty if there is no mean, without the spread if there is one value."""
    from aida_lab.progress.status import in_words

    if found is None:
        return ""
    return in_words(found.mean) + ("" if found.std is None else f" ± {found.std:.2g}")


def best_in_words(best: float | None, epoch: int | None) -> str:
    """``97.31 (12)``: a run's best value and its epoch; empty if there is none."""
    from aida_lab.progress.status import in_words

    return "" if best is None else f"{in_words(best)} ({epoch})"


def state_in_colour(state: str, text: str = "") -> Any:
    """The state of a run, or a text about it, in the colour of the state."""
    from rich.text import Text

    from aida_lab.progress.status import STYLES

    return Text(text or state, style=STYLES.get(state, ""))


@contextmanager
def supervised(board: Board) -> Iterator[tuple[Listener, Stop]]:
    """Show the progress of runs and stop them on Ctrl-C. A second Ctrl-C ends the block at once."""
    from aida_lab.progress.display import shown

    with Stop(lambda: say("stopping: runs are saved first; Ctrl-C again stops without saving", err=True)) as stop:
        try:
            with shown(console(), board) if prints() else nullcontext(lambda event: None) as listen:
                yield listen, stop
        except KeyboardInterrupt:
            stop.ask()
            say("stopped without saving; the same command resumes from the last checkpoints", err=True)


def fail(message: str) -> NoReturn:
    """End the command because of its arguments: print one line, exit with status 2."""
    say(message, err=True)
    raise typer.Exit(2)
