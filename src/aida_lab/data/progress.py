"""Progress of a download: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aida_lab.data.download import Progress

#: Seconds between two lines about one file without a terminal.
_EVERY = 10.0


@contextmanager
def shown(console: Any) -> Iterator[Progress]:
    """A progress callback that draws on a rich console."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    description = TextColumn("{task.description}")
    columns = description, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def update(name: str, here: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=here, total=total)

        yield update


class _Lines:
    """Prints a line when a file starts, every few seconds, and when it is complete."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._last: dict[str, float] = {}

    def __call__(self, name: str, here: int, total: int | None) -> None:
        now = time.monotonic()
        if name in self._last and here != total and now - self._last[name] < _EVERY:
            return
        self._last[name] = now
        of = f" of {total / 1e6:,.1f}" if total is not None else ""
        self._console.print(f"{name}: {here / 1e6:,.1f}{of} MB")
