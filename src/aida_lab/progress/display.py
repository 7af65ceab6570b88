"""Show the progress of runs: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aida_lab.events import Event, Listener
from aida_lab.progress.status import STYLES, Board, RunProgress, time_left
from aida_lab.runs.files import printable

#: Seconds between two lines about one run without a terminal.
_EVERY = 10.0


@contextmanager
def shown(console: Any, board: Board) -> Iterator[Listener]:
    """A listener that updates ``board`` and draws it on a rich console."""
    if not console.is_terminal:
        yield Lines(console, board)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    names = ("description", "fields[epoch]", "fields[metric]", "fields[left]")
    label, *words = (TextColumn(f"{{task.{each}}}", markup=False) for each in names)
    # redrawn twice per second: more would slow down training on a small machine
    with Progress(label, BarColumn(bar_width=20), *words, console=console, refresh_per_second=2) as progress:
        yield Bars(progress, board)


class Bars:
    """One bar per running run and one for all. The last line of a run that ended stays above them."""

    def __init__(self, progress: Any, board: Board) -> None:
        self._progress = progress
        self._board = board
        self._lines: dict[str, Any] = {}
        self._overall = self._add("all runs", None)
        self._draw_all()

    def __call__(self, event: Event) -> None:
        if event.kind == "note":
            self._print(self._board.note(event), "dim")
            return
        run = self._board.take(event)
        if run.ended:
            line = self._lines.pop(event.run, None)
            if line is not None:
                self._progress.remove_task(line)
            self._print(ending(run), STYLES[run.state])
        else:
            self._draw(event.run, run)
        self._draw_all()

    def _draw(self, key: str, run: RunProgress) -> None:
        epoch, metric, left = run.in_words(self._board.clock())
        if key not in self._lines:
            self._lines[key] = self._add(printable(run.label), run.epochs)
        self._progress.update(self._lines[key], completed=run.done, epoch=epoch, metric=metric, left=left)

    def _draw_all(self) -> None:
        board = self._board
        ended, left = f"{board.ended}/{len(board.runs)} runs", time_left(board.seconds_left())
        self._progress.update(
            self._overall, completed=board.done(), total=board.total() or None, epoch=ended, left=left
        )

    def _add(self, label: str, total: int | None) -> Any:
        return self._progress.add_task(label, total=total, epoch="", metric="", left="")

    def _print(self, text: str, style: str) -> None:
        self._progress.console.print(printable(text), style=style, markup=False, emoji=False, highlight=False)


class Lines:
    """A line when a run starts and ends; in between at most one per epoch and per ten seconds."""

    def __init__(self, console: Any, board: Board) -> None:
        self._console = console
        self._board = board
        self._last: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        if event.kind == "note":
            self._print(self._board.note(event))
            return
        run = self._board.take(event)
        if run.ended:
            self._print(f"[{self._board.ended}/{len(self._board.runs)}] {ending(run)}")
        elif event.kind == "started":
            self._print(f"{run.label}: started, {event.text or f'{run.epochs} epochs'}")
            self._last[event.run] = self._board.clock()
        elif event.kind == "epoch" and self._due(event.run):
            self._print(f"{run.label}: {', '.join(filter(None, run.in_words(self._board.clock())))}")

    def _due(self, key: str) -> bool:
        now = self._board.clock()
        if now - self._last.get(key, -_EVERY) < _EVERY:
            return False
        self._last[key] = now
        return True

    def _print(self, text: str) -> None:
        # not wrapped, so that grep finds whole lines
        self._console.print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


def ending(run: RunProgress) -> str:
    """The last line about a run."""
    if run.state == "skipped":
        how = run.text or "already finished"
    elif run.state == "interrupted":
        how = f"interrupted after {run.epoch_in_words()}, saved; the same command resumes it"
    else:
        how = run.state + (f" at {run.epoch_in_words()}" if run.state == "diverged" else "")
        how += f": {run.text}" if run.text else ""
    measured = run.metric_in_words()
    return f"{run.label}: {how}" + (f", {measured}" if measured and run.state != "failed" else "")
