"""What a run says while it goes on; a display, a log or another process listens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["started", "step", "epoch", "finished", "diverged", "skipped", "interrupted", "failed", "note"]


@dataclass(frozen=True)
class Event:
    """One moment of a run; plain values, so that it travels as JSON."""

    kind: Kind
    #: The key of the run's spec.
    run: str
    #: Epochs completed, of how many.
    epoch: int = 0
    epochs: int = 0
    #: How much of the current epoch is done.
    share: float = 0.0
    #: The curve's row of a completed epoch, or the result.
    row: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


Listener = Callable[[Event], None]
