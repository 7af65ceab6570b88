"""``aida watch``: stepsizes and curves of runs while they train."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aida_lab.cli.printing import console, load_torch

if TYPE_CHECKING:
    from aida_lab.progress.watched import Watcher

#: Seconds between two looks at the files.
_EVERY = 1.0

#: Arrow and page keys send several bytes.
_KEY = re.compile(rb"\x1b[\[O][\d;]*[A-Za-z~]|.", re.DOTALL)
#: Lines, and pages, that a key scrolls.
_SCROLLS = {
    b"k": (-1, 0), b"\x1b[A": (-1, 0), b"\x1bOA": (-1, 0), b"j": (1, 0), b"\x1b[B": (1, 0), b"\x1bOB": (1, 0),
    b"b": (0, -1), b"\x1b[5~": (0, -1), b" ": (0, 1), b"\x1b[6~": (0, 1),
}  # fmt: skip


def watch(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Runs, each a folder or a file of aida.JsonLines; or a folder of them.",
            show_default="runs",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and end.")] = False,
) -> None:
    """Show stepsizes and learning curves of runs while they train.

    Each layer has its mean stepsize, the share of its elements at the bound, the ratio of update to weight, and
    trends of both. The display follows the files every second; arrow keys scroll, q quits. It shows runs of aida
    train --probe, and your own training loop if aida.StepsizeProbe writes a file with aida.JsonLines. Files may
    appear later. Without a terminal the state is printed once.
    """
    load_torch()
    from aida_lab.progress.watched import Watcher

    shown, watcher = console(), Watcher(paths or [Path("runs")])
    if not once and shown.is_terminal and not shown.is_dumb_terminal:
        with suppress(KeyboardInterrupt):
            _live(shown, watcher)
        return
    for line in _lines(shown, watcher):
        shown.print(line, no_wrap=True, overflow="ignore", crop=False)
    if not any(run.changed for run in watcher.look()):
        raise typer.Exit(1)


def _lines(shown: Any, watcher: Watcher) -> list[Any]:
    from rich.text import Text

    from aida_lab.progress.frame import frame

    runs = watcher.look()
    lines = frame(runs, shown.width, shown.options.ascii_only)
    if len(runs) < watcher.found:
        lines.insert(0, Text(f"{len(runs)} of {watcher.found} runs, those that changed last", "dim"))
    return lines


def _live(shown: Any, watcher: Watcher) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # restores the terminal
    first = 0
    with _keys() as key, Live(console=shown, screen=True, auto_refresh=False) as live:
        while True:
            lines, room = _lines(shown, watcher), max(1, shown.height - 1)
            first = max(0, min(first, len(lines) - room))
            last = min(len(lines), first + room)
            said = f" q quits, arrow keys scroll: lines {first + 1} to {last} of {len(lines)}   {time.strftime('%X')} "
            status = Text(said[: shown.width], "reverse")
            padding = [Text()] * (room - (last - first))
            live.update(Group(*lines[first:last], *padding, status), refresh=True)
            pressed = key(_EVERY)
            if pressed is None or b"q" in pressed.lower():
                return
            for one in _KEY.findall(pressed):  # a key that is held sends many at once
                few, pages = _SCROLLS.get(one, (0, 0))
                first += few + pages * room


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes | None]]:
    """A function that waits for a key: empty if none came in that many seconds, None if none can come any more."""

    def no_key(seconds: float) -> bytes:
        time.sleep(seconds)
        return b""

    if not sys.stdin.isatty():
        yield no_key
        return
    try:
        import termios
        import tty
    except ImportError:  # Windows: Ctrl-C quits
        yield no_key
        return
    from select import select

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def key(seconds: float) -> bytes | None:
        ready, _, _ = select([terminal], [], [], seconds)
        return (os.read(terminal, 1024) or None) if ready else b""

    try:
        tty.setcbreak(terminal)
        yield key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
