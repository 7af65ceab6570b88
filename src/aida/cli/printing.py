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
    from rich.console import Console

    found = Console(highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found = Console(highlight=False, width=_WIDE)
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


def say_written(paths: Iterable[Path]) -> None:
    for path in paths:
        typer.echo(f"wrote {path}")


def values_in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def fail(message: str) -> NoReturn:
    """The command cannot do what its words ask for."""
    typer.echo(message, err=True)
    raise typer.Exit(2)
