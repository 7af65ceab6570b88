"""The processes that train side by side: started, given runs, listened to, replaced when they die."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from aida_lab.events import Event, Listener
from aida_lab.spec import RunSpec
from aida_lab.training.options import Options
from aida_lab.workers.attempt import Outcome, note_failure
from aida_lab.workers.worker import GRACE, request

#: Not ``-m``, which would look for all modules in the folder we work in first; and ``-P`` came with Python 3.11.
_START = "import sys; sys.path[:] = filter(None, sys.path); from aida_lab.workers.worker import main; main()"

#: How much of what a dead process wrote is kept with its run.
_TAIL = 50


@dataclass(frozen=True)
class Orders:
    """What all processes of a crew have in common."""

    out: Path
    options: Options
    #: Function that trains, as ``module:function``.
    runner: str
    #: Where each writes what is printed in it.
    logs: Path
    environment: Mapping[str, str]
    #: Descriptors that each inherits.
    held: tuple[int, ...] = ()


class Worker:
    """One process, as its employer sees it."""

    def __init__(self, orders: Orders, number: int) -> None:
        self.run: RunSpec | None = None
        #: Whether it will say nothing more.
        self.silent = False
        self._orders = orders
        self._log = orders.logs / f"worker-{number}.log"
        self._log_before = 0
        self._unread = b""
        self.events, theirs = os.pipe()
        os.set_blocking(self.events, False)
        command = [sys.executable, "-c", _START, "--events", str(theirs), "--runner", orders.runner]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=orders.environment,
                pass_fds=(theirs, *orders.held),
                start_new_session=True,  # a Ctrl-C is for its employer, who tells it to save
            )
        os.close(theirs)

    def give(self, spec: RunSpec) -> None:
        self.run = spec
        self._log_before = self._log.stat().st_size
        self.tell(request(spec, self._orders.out, self._orders.options))

    def tell(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it died: its end is noticed where all ends are
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def messages(self) -> Iterator[Mapping[str, Any]]:
        """What it has said by now."""
        while True:
            try:
                read = os.read(self.events, 1 << 16)
            except BlockingIOError:
                break
            if not read:
                self.silent = True
                break
            self._unread += read
        *lines, self._unread = self._unread.split(b"\n")
        yield from map(json.loads, lines)

    def end_in_words(self) -> str:
        """How it died, in one line."""
        code = self.process.returncode
        if code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        else:
            how = f"ended with code {code}"
        said = self.tail()
        return f"the process that trained it {how}" + (f"; it said: {said[-1]}" if said else "")

    def tail(self) -> list[str]:
        """The last lines it printed while it had its run."""
        with self._log.open("rb") as log:
            log.seek(self._log_before)
            return log.read().decode(errors="replace").strip().splitlines()[-_TAIL:]

    def dismiss(self) -> None:
        """Nothing more will come: it saves what it trains, and ends."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()


class Crew:
    """At most ``size`` processes; a new one is started when a run comes and none is free.

    ``orders`` is asked before the first one is: where no run has work to do, nothing is prepared.
    """

    def __init__(self, size: int, orders: Callable[[], Orders]) -> None:
        self._size = size
        self._orders = cache(orders)
        self._workers: list[Worker] = []
        self._started = 0
        self._stopping = False
        self._selector = selectors.DefaultSelector()

    @property
    def busy(self) -> bool:
        return any(worker.run for worker in self._workers)

    @property
    def has_room(self) -> bool:
        return len(self._workers) < self._size or any(worker.run is None for worker in self._workers)

    def give(self, spec: RunSpec) -> None:
        free = next((worker for worker in self._workers if worker.run is None), None)
        (free or self._hire()).give(spec)

    def outcomes(self, listen: Listener, patience: float) -> list[Outcome]:
        """Pass on what happens, for so many seconds at most; returns what ended."""
        ended: list[Outcome] = []
        for key, _ in self._selector.select(patience):
            ended += self._hear(key.data, listen)
        for worker in list(self._workers):
            if worker.process.poll() is not None:
                ended += self._hear(worker, listen)
                ended += self._bury(worker, listen)
        return ended

    def stop(self) -> None:
        """Ask every process to save its run and to stop it; once is enough."""
        if not self._stopping:
            self._stopping = True
            for worker in self._workers:
                worker.tell({"stop": True})

    def close(self, patience: float = GRACE) -> None:
        """Let all go: each may save its run first, for so many seconds; then it is killed."""
        end = time.monotonic() + patience
        try:
            for worker in self._workers:
                worker.dismiss()
            for worker in self._workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(end - time.monotonic(), 0.0))
        finally:
            for worker in list(self._workers):
                worker.process.kill()
                worker.process.wait()
                self._forget(worker)
            self._selector.close()

    def _hire(self) -> Worker:
        worker = Worker(self._orders(), self._started)
        self._started += 1
        self._workers.append(worker)
        self._selector.register(worker.events, selectors.EVENT_READ, worker)
        return worker

    def _hear(self, worker: Worker, listen: Listener) -> list[Outcome]:
        ended: list[Outcome] = []
        for message in worker.messages():
            if "event" in message:
                listen(Event(**message["event"]))
            else:
                worker.run = None
                ended.append(Outcome(**message["outcome"]))
                if not message["usable"]:
                    worker.process.kill()
                    worker.process.wait()
        if worker.silent and worker.events in self._selector.get_map():
            self._selector.unregister(worker.events)  # else it would be ready all the time until the process is gone
        return ended

    def _bury(self, worker: Worker, listen: Listener) -> list[Outcome]:
        self._forget(worker)
        if worker.run is None:
            return []
        if self._stopping and worker.process.returncode == 0:  # it was still starting when it was told to stop
            listen(Event("interrupted", worker.run.key, epochs=worker.run.epochs))
            return [Outcome(worker.run.key, "interrupted", "stopped before it began")]
        said = worker.end_in_words()
        note_failure(worker.run, self._orders().out, said, "\n".join(worker.tail()))
        listen(Event("failed", worker.run.key, epochs=worker.run.epochs, text=said))
        return [Outcome(worker.run.key, "failed", said)]

    def _forget(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.dismiss()
        if worker.events in self._selector.get_map():
            self._selector.unregister(worker.events)
        os.close(worker.events)
