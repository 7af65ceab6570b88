"""Ctrl-C while many runs train: the first saves them, the second gives them up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

#: Those that are entered, the innermost last.
_entered: list[Stop] = []


def asked() -> bool:
    """Whether a stop that is entered in this process was asked."""
    return any(stop.asked for stop in _entered)


class Stop:
    """Takes SIGINT and SIGTERM while it is entered; only in the main thread, as Python wants it.

    A run in this very process has its own handlers meanwhile, which hand the signals on.
    """

    def __init__(self, when_asked: Callable[[], object] = lambda: None) -> None:
        #: The signal that asked; 0 for none.
        self.signal = 0
        #: Whether it was asked twice: then nothing is waited for.
        self.urgent = False
        self._when_asked = when_asked
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.signal != 0

    def ask(self, number: int = signal.SIGINT) -> None:
        """Let no other run begin, and those at hand be saved."""
        self.signal = self.signal or number

    def _take(self, number: int, frame: Any) -> None:
        if self.asked:
            self.urgent = True
            raise KeyboardInterrupt
        self.ask(number)
        self._when_asked()

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
