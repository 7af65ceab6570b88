"""What a command that trains says when it is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from aida_lab.stopping import Stop


def announced_stop() -> Stop:
    """A stop that answers the first Ctrl-C."""
    from aida_lab.stopping import Stop

    return Stop(lambda: typer.echo("stopping: runs are saved first; Ctrl-C again gives them up", err=True))


@contextmanager
def given_up_when_hurried(stop: Stop) -> Iterator[None]:
    """A second Ctrl-C ends what is in here."""
    try:
        yield
    except KeyboardInterrupt:
        stop.ask()
        typer.echo("given up; the same command goes on from the last checkpoints", err=True)
