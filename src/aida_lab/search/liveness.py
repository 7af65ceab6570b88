"""Which workers are still there: each says so every few seconds, and each listens to the others.

No clock is compared with another machine's. A worker that is not heard of is given up only after a while in
which it was listened for, so that neither a database that was away nor a machine that slept makes others look dead.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

#: Seconds of silence after which a worker is taken for dead, unless said otherwise.
GRACE = 60.0


@cache
def this_worker() -> Mapping[str, Any]:
    """What tells this process from any other, as JSON."""
    return {"host": socket.gethostname(), "process": os.getpid(), "system": _system(), "born": _born(os.getpid())}


def is_gone(worker: Mapping[str, Any]) -> bool:
    """Whether a worker is dead for sure: one of this very system, where processes can be looked at."""
    ours = this_worker()["system"]
    return bool(ours) and worker.get("system") == ours and worker.get("born") != _born(int(worker.get("process", 0)))


def _system() -> str:
    """Names a boot and a space of process numbers: containers have their own. Empty where that is not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(process: int) -> str:
    """When a process began, so that another of its number is not taken for it; empty where there is none."""
    with suppress(OSError):
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else rest[18]
    return ""


@dataclass
class _Heard:
    """The last beat of a trial, and for how many seconds there was no other."""

    beat: object
    silence: float = 0.0


class Watch:
    """A thread that beats for the trials held here and listens for those of others."""

    def __init__(
        self, beat: Callable[[int, int], object], look: Callable[[], Mapping[int, object] | None], grace: float
    ):
        """``beat(trial, number)`` says that a trial is worked on; ``look`` gives the last beat of each running trial,
        or None where it could not be asked."""
        self._beat, self._look = beat, look
        self.grace = grace
        self._every = grace / 6
        self._held: dict[int, int] = {}
        self._heard: dict[int, _Heard] = {}
        self._looked_at: float | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aida-search-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def hold(self, trial: int) -> None:
        with self._lock:
            self._held[trial] = 0

    def let_go(self, trial: int) -> None:
        with self._lock:
            self._held.pop(trial, None)

    def silent(self) -> Collection[int]:
        """Trials of others that have not been heard of for too long."""
        with self._lock:
            return {
                trial for trial, heard in self._heard.items() if heard.silence > self.grace and trial not in self._held
            }

    def _run(self) -> None:
        while not self._end.wait(self._every):
            self.turn()

    def turn(self) -> None:
        """Beat, and listen."""
        with self._lock:
            self._held = {trial: number + 1 for trial, number in self._held.items()}
            held = dict(self._held)
        for trial, number in held.items():
            self._beat(trial, number)
        beats = self._look()
        now = time.monotonic()
        with self._lock:
            if beats is None:
                self._looked_at = None
                return
            # a look that comes late counts as one in time: meanwhile nobody listened
            passed = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * self._every)
            self._looked_at = now
            self._heard = {
                trial: _Heard(beat, known.silence + passed)
                if (known := self._heard.get(trial)) is not None and known.beat == beat
                else _Heard(beat)
                for trial, beat in beats.items()
            }
