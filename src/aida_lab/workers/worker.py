"""A process that trains one run after another for :mod:`aida_lab.workers.pool`.

It reads requests as JSON lines from stdin and writes events and outcomes as JSON lines to a separate pipe, so that the
output of libraries cannot mix with them. When stdin closes, it saves the current run and exits.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from aida_lab.events import Event
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.training.options import Options
from aida_lab.workers.attempt import attempt, gpu_is_usable, runner_named

#: Seconds that a run may take to save itself after stdin has closed.
SAVE_TIMEOUT = 120.0


def request(spec: RunSpec, out: Path, options: Options) -> dict[str, Any]:
    """Encode a request to train a run."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    return {"spec": spec.to_json(), "out": str(out), "options": settings}


def read_request(content: Mapping[str, Any]) -> tuple[RunSpec, Path, Options]:
    """Decode the result of :func:`request`."""
    paths = {each.name for each in fields(Options) if "Path" in str(each.type)}
    options: dict[str, Any] = {
        name: Path(value) if name in paths and value is not None else value
        for name, value in content["options"].items()
    }
    return RunSpec.from_json(content["spec"]), Path(content["out"]), Options(**options)


def _lines(descriptor: int) -> Iterator[bytes]:
    # not sys.stdin: a blocked reader thread holds its lock, which the interpreter needs at exit
    unread = b""
    while read := os.read(descriptor, 1 << 16):
        *lines, unread = (unread + read).split(b"\n")
        yield from lines


class Requests:
    """Reads requests in a thread, so that a request to stop arrives during training."""

    def __init__(self, descriptor: int) -> None:
        self._lines = _lines(descriptor)
        self._waiting: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        #: Also stops the current run. A signal between two runs ends the process.
        self.stop = Stop(when_asked=lambda: self._waiting.put(None))
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        while (content := self._waiting.get()) is not None and not self.stop.asked:
            yield content

    def _read(self) -> None:
        for line in self._lines:
            message = json.loads(line)
            if "stop" in message:
                break
            self._waiting.put(message)
        self.stop.ask()
        self._waiting.put(None)
        for _ in self._lines:
            pass  # until stdin closes, the pool still waits for the outcome
        time.sleep(SAVE_TIMEOUT)
        os._exit(1)


def main(events: int, runner: str) -> None:
    """Train the requested runs until stdin closes, and write messages to the file descriptor ``events``."""
    faulthandler.enable()  # a crash in C code writes the Python stack to the log
    train = runner_named(runner)
    # if the pool is gone, stdin closes as well, which stops this process
    with suppress(BrokenPipeError), os.fdopen(events, "w", encoding="utf-8") as pipe:

        def send(message: Mapping[str, Any]) -> None:
            with suppress(BrokenPipeError):
                pipe.write(json.dumps(message) + "\n")
                pipe.flush()

        def forward(event: Event) -> None:
            send({"event": {**vars(event), "row": dict(event.row)}})

        requests = Requests(sys.stdin.fileno())
        with requests.stop:
            for content in requests:
                spec, out, options = read_request(content)
                outcome = attempt(spec, out, options, forward, train)
                usable = gpu_is_usable()
                send({"outcome": asdict(outcome), "usable": usable})
                if not usable:
                    break
