"""A pool of worker processes: starts them, assigns runs, receives events and replaces workers that die."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from aida_lab.events import Event, Listener, Pruned
from aida_lab.spec import RunSpec
from aida_lab.workers.attempt import Outcome, record_failure
from aida_lab.workers.worker import Prune, WorkerConfig

#: Not ``-m``, which puts the working directory first on the module path. ``-P`` needs Python 3.11.
_START = "import sys; sys.path[:] = filter(None, sys.path); from aida_lab.workers.worker import main; main({})"

#: Number of log lines of a dead worker that are kept with its run.
_TAIL = 50


class Worker:
    """One worker process, seen from the pool. If its connection is closed, it saves its run and exits."""

    def __init__(self, config: WorkerConfig, number: int) -> None:
        self.run: RunSpec | None = None
        self.closed = False  #: whether the worker has closed its end of the connection
        self._log = config.logs / f"worker-{number}.log"
        self._log_start = 0
        self.connection, theirs = Pipe()
        with theirs, self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START.format(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=config.environment,
                pass_fds=(theirs.fileno(), *config.fds),
                start_new_session=True,  # Ctrl-C reaches only the pool, which asks the worker to save
            )
        self.send(config)

    def train(self, spec: RunSpec) -> None:
        self.run = spec
        self._log_start = self._log.stat().st_size
        self.send(spec)

    def send(self, message: Any) -> None:
        with suppress(OSError):  # the worker died: the pool reaps it later
            self.connection.send(message)

    def messages(self) -> Iterator[Event | tuple[Outcome, bool]]:
        """Receive the messages that have arrived: events, and outcomes with whether the GPU is still usable."""
        try:
            while not self.closed and self.connection.poll():
                yield self.connection.recv()
        except (EOFError, OSError):
            self.closed = True

    def exit_message(self) -> str:
        """How the worker died, in one line."""
        code = self.process.returncode
        if code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        else:
            how = f"ended with code {code}"
        lines = self.tail()
        return f"the worker process {how}" + (f"; its last output: {lines[-1]}" if lines else "")

    def tail(self) -> list[str]:
        """The last lines that the worker printed during its current run."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").strip().splitlines()[-_TAIL:]


class WorkerPool:
    """At most ``size`` workers. A new one is started if a run is submitted and no worker is free.

    ``config`` is called when the first worker starts, so that nothing is prepared if there is nothing to train.
    """

    def __init__(self, size: int, config: Callable[[], WorkerConfig]) -> None:
        self._size = size
        self._config = cache(config)
        self._workers: list[Worker] = []
        self._started = 0
        self._stopping = False

    @property
    def busy(self) -> bool:
        return any(worker.run for worker in self._workers)

    @property
    def has_room(self) -> bool:
        return len(self._workers) < self._size or any(worker.run is None for worker in self._workers)

    def submit(self, spec: RunSpec) -> None:
        free = next((worker for worker in self._workers if worker.run is None), None)
        (free or self._start()).train(spec)

    def outcomes(self, listen: Listener, timeout: float) -> list[Outcome]:
        """Wait at most ``timeout`` seconds for messages, forward events and return the outcomes of runs that ended."""
        # without closed connections, which are always ready and would make the pool spin
        wait([worker.connection for worker in self._workers if not worker.closed], timeout)
        ended: list[Outcome] = []
        for worker in list(self._workers):
            ended += self._receive(worker, listen)
            if worker.process.poll() is not None:
                ended += self._receive(worker, listen)
                ended += self._reap(worker, listen)
        return ended

    def stop(self) -> None:
        """Ask every worker to save its run and to stop. Later calls do nothing."""
        if not self._stopping:
            self._stopping = True
            for worker in self._workers:
                worker.send(None)

    def close(self, timeout: float) -> None:
        """Give the workers ``timeout`` seconds to save their runs and exit, then kill them."""
        end = time.monotonic() + timeout
        try:
            for worker in self._workers:
                worker.connection.close()
            for worker in self._workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(end - time.monotonic(), 0.0))
        finally:
            for worker in list(self._workers):
                worker.process.kill()
                worker.process.wait()
            self._workers.clear()

    def _start(self) -> Worker:
        worker = Worker(self._config(), self._started)
        self._started += 1
        self._workers.append(worker)
        return worker

    def _receive(self, worker: Worker, listen: Listener) -> list[Outcome]:
        ended: list[Outcome] = []
        for message in worker.messages():
            if isinstance(message, Event):
                try:
                    listen(message)
                except Pruned:
                    worker.send(Prune(message.run))
                continue
            outcome, usable = message
            worker.run = None
            ended.append(outcome)
            if not usable:
                worker.process.kill()
                worker.process.wait()
        return ended

    def _reap(self, worker: Worker, listen: Listener) -> list[Outcome]:
        self._workers.remove(worker)
        worker.connection.close()
        if worker.run is None:
            return []
        if self._stopping and worker.process.returncode == 0:  # it was still starting when it was asked to stop
            listen(Event("interrupted", worker.run.key, epochs=worker.run.epochs))
            return [Outcome(worker.run.key, "interrupted", "stopped before it started")]
        message = worker.exit_message()
        record_failure(worker.run, self._config().out, message, "\n".join(worker.tail()))
        listen(Event("failed", worker.run.key, epochs=worker.run.epochs, text=message))
        return [Outcome(worker.run.key, "failed", message)]
