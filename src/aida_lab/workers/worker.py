"""A process that trains one run after another for :mod:`aida_lab.workers.pool`.

One connection carries the pool's messages in, and events and outcomes out, so that the output of libraries cannot mix
with them. When the pool closes it, this process saves the current run and exits.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any, NamedTuple

from aida_lab.events import Event, Pruned
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.training.options import Options
from aida_lab.workers.attempt import attempt, gpu_is_usable

#: Seconds that a run may take to save itself after the connection was closed.
SAVE_TIMEOUT = 120.0


@dataclass(frozen=True)
class WorkerConfig:
    """What all workers of a pool have in common."""

    out: Path
    options: Options
    runner: str  #: function that trains a run, as ``module:function``
    logs: Path  #: folder for the output of the workers
    environment: Mapping[str, str]
    fds: tuple[int, ...] = ()  #: file descriptors that each worker inherits


class Prune(NamedTuple):
    """The message that ends a run early."""

    run: str


class Inbox:
    """Receives messages in a thread, so that a request to stop or to prune arrives during training.

    Messages: a :class:`RunSpec` to train, a :class:`Prune`, or None to save the current run and exit.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._waiting: SimpleQueue[RunSpec | None] = SimpleQueue()
        self.pruned: set[str] = set()
        #: Also stops the current run. A signal between two runs ends the process.
        self.stop = Stop(when_asked=lambda: self._waiting.put(None))
        threading.Thread(target=self._receive, daemon=True).start()

    def __iter__(self) -> Iterator[RunSpec]:
        while (spec := self._waiting.get()) is not None and not self.stop.asked:
            yield spec

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                message: RunSpec | Prune | None = self._connection.recv()
                if isinstance(message, RunSpec):
                    self._waiting.put(message)
                elif isinstance(message, Prune):
                    self.pruned.add(message.run)
                else:
                    self._stop()
        self._stop()
        time.sleep(SAVE_TIMEOUT)
        os._exit(1)

    def _stop(self) -> None:
        self.stop.ask()
        self._waiting.put(None)


def main(descriptor: int) -> None:
    """Train the requested runs until the pool closes the connection with this file descriptor."""
    faulthandler.enable()  # a crash in C code writes the Python stack to the log
    connection: Connection[Any, Any] = Connection(descriptor)
    config: WorkerConfig = connection.recv()
    train = resolve_name(config.runner)

    def send(message: Any) -> None:
        with suppress(OSError):  # the pool is gone, which stops this process
            connection.send(message)

    inbox = Inbox(connection)

    def forward(event: Event) -> None:
        send(event)
        if event.kind == "epoch" and event.epoch < event.epochs and event.run in inbox.pruned:
            raise Pruned

    with inbox.stop:
        for spec in inbox:
            outcome = attempt(spec, config.out, config.options, forward, train)
            usable = gpu_is_usable()
            send((outcome, usable))
            if not usable:
                break
