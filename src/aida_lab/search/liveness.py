"""Heartbeats: every worker updates a counter for its trials, and every worker checks the counters of the others.

Clocks of different machines are never compared. A trial times out only while this worker could read its heartbeat, so
that a storage outage or a suspended machine does not make other workers look dead.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

#: Seconds without a heartbeat after which a worker counts as dead.
TIMEOUT = 60.0


@cache
def this_worker() -> Mapping[str, Any]:
    """Identify this process among all workers, as JSON."""
    process = os.getpid()
    return {"host": socket.gethostname(), "process": process, "system": _system(), "born": _start_time(process)}


def is_dead(worker: Mapping[str, Any]) -> bool:
    """Whether a worker is known to be dead. Only processes of the same system can be checked."""
    ours = this_worker()["system"]
    return (
        bool(ours) and worker.get("system") == ours and worker.get("born") != _start_time(int(worker.get("process", 0)))
    )


def _system() -> str:
    """Identify the boot and the PID namespace, which containers have of their own; empty if unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(process: int) -> str:
    """When a process started, which detects a reused PID; empty if there is no such process."""
    with suppress(OSError):
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else rest[18]
    return ""


class Heartbeat:
    """A thread that sends heartbeats for the trials of this worker and reads those of all running trials.

    ``send(trial, number)`` stores a heartbeat. ``read`` returns the last heartbeat per running trial, or None if the
    storage does not answer.
    """

    def __init__(
        self, send: Callable[[int, int], object], read: Callable[[], Mapping[int, object] | None], timeout: float
    ) -> None:
        self._send, self._read, self._timeout = send, read, timeout
        self._interval = timeout / 6
        self._own: dict[int, int] = {}
        #: The last heartbeat per running trial, and the seconds since it changed.
        self._seen: dict[int, tuple[object, float]] = {}
        self._read_at: float | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aida-search-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, trial: int) -> None:
        with self._lock:
            self._own[trial] = 0

    def remove(self, trial: int) -> None:
        with self._lock:
            self._own.pop(trial, None)

    def timed_out(self) -> Collection[int]:
        """Trials of other workers without a heartbeat for longer than the timeout."""
        with self._lock:
            return {trial for trial, (_, age) in self._seen.items() if age > self._timeout and trial not in self._own}

    def _run(self) -> None:
        while not self._end.wait(self._interval):
            self.tick()

    def tick(self) -> None:
        """Send the heartbeats of this worker and read all others."""
        with self._lock:
            self._own = {trial: number + 1 for trial, number in self._own.items()}
            own = dict(self._own)
        for trial, number in own.items():
            self._send(trial, number)
        beats = self._read()
        now = time.monotonic()
        with self._lock:
            if beats is None:
                self._read_at = None
                return
            # limited, because this worker may have been suspended since the last read
            passed = 0.0 if self._read_at is None else min(now - self._read_at, 2 * self._interval)
            self._read_at = now
            old, self._seen = self._seen, {}
            for trial, beat in beats.items():
                last, age = old.get(trial, (None, 0.0))
                self._seen[trial] = (beat, age + passed if trial in old and last == beat else 0.0)
