"""Stop runs on Ctrl-C or SIGTERM: the first signal saves them, the second aborts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

#: Stops that are entered, the innermost last.
_entered: list[Stop] = []


class Stop:
    """A request to stop, set by :meth:`ask` or, while it is entered in the main thread, by SIGINT or SIGTERM.

    Stops nest: a request to an outer stop holds for all stops entered inside it. The outermost handles signals.
    """

    def __init__(self, when_asked: Callable[[], object] = lambda: None) -> None:
        self.signal = 0  #: the signal of the first request; 0 if there was none
        self.urgent = False  #: whether a second signal came: nothing is waited for
        self._when_asked = when_asked
        self._outer: Stop | None = None
        self._handlers: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.signal != 0 or (self._outer is not None and self._outer.asked)

    def ask(self, number: int = signal.SIGINT) -> None:
        """Start no other run, and save those that train. Can be called in any thread."""
        self.signal = self.signal or number

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked:
            self.urgent = True
            raise KeyboardInterrupt
        self.ask(number)
        self._when_asked()

    def __enter__(self) -> Stop:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and not any(stop._handlers for stop in _entered):
            self._handlers = {each: signal.signal(each, self._handle) for each in (signal.SIGINT, signal.SIGTERM)}
        self._outer = _entered[-1] if _entered else None
        _entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _entered.remove(self)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
