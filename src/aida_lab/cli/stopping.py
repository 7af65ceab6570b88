"""What a training command prints when it is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from aida_lab.stopping import Stop


def announced_stop() -> Stop:
    """A stop that acknowledges the first Ctrl-C."""
    from aida_lab.stopping import Stop

    return Stop(lambda: typer.echo("stopping: runs are saved first; Ctrl-C again stops without saving", err=True))


@contextmanager
def given_up_when_hurried(stop: Stop) -> Iterator[None]:
    """A second Ctrl-C ends this block at once."""
    try:
        yield
    except KeyboardInterrupt:
        stop.ask()
        typer.echo("stopped without saving; the same command resumes from the last checkpoints", err=True)
