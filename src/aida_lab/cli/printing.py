"""How the commands speak: a console, tables, one line for an error. Rich is imported when something is drawn."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer

#: Columns of a console that is no terminal: a file or a pipe need not be folded to the 80 of old ones.
_WIDE = 200


def console() -> Any:
    """A console that prints text as it is: no markup, no emoji, and nothing that a terminal would obey."""
    from rich.console import Console
    from rich.text import Text

    from aida_lab.runs.files import printable

    class Plain(Console):
        # every string passes here on its way to the screen: printed, of a table, or its title
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    settings: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    found = Plain(**settings)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found = Plain(**settings, width=_WIDE)
    return found


def table(title: str, *columns: str, dense: bool = False) -> Any:
    """An empty table; ``dense`` for one of many rows and columns, with few rules."""
    from rich import box
    from rich.table import Table

    drawn = Table(
        title=title or None,
        title_justify="left",
        show_header=any(columns),
        box=box.SIMPLE_HEAD if dense else box.HEAVY_HEAD,
        pad_edge=not dense,
        padding=(0, 0) if dense else (0, 1),
    )
    for column in columns:
        drawn.add_column(column, overflow="fold")
    return drawn


def say(text: str, err: bool = False) -> None:
    """A line of text; what a terminal would obey, such as an escape out of a run's folder, is printed as an escape."""
    from aida_lab.runs.files import printable

    typer.echo(printable(text), err=err)


def say_written(paths: Iterable[Path]) -> None:
    for path in paths:
        say(f"wrote {path}")


def values_in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def fail(message: str) -> NoReturn:
    """The command cannot do what its words ask for."""
    say(message, err=True)
    raise typer.Exit(2)
