"""Events of a run that trains, for a display, a log or another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["started", "step", "epoch", "finished", "diverged", "skipped", "interrupted", "failed", "note"]


@dataclass(frozen=True)
class Event:
    """One event of a run. It holds plain values, which JSON can encode."""

    kind: Kind
    run: str  #: the key of the run's spec; empty if the event is about no run
    epoch: int = 0  #: completed epochs
    epochs: int = 0  #: epochs in all
    share: float = 0.0  #: the completed fraction of the current epoch
    row: Mapping[str, Any] = field(default_factory=dict)  #: the row of the curve for a completed epoch, or the result
    text: str = ""


class Pruned(Exception):  # noqa: N818 - not an error
    """Raised by a listener to stop the run of an "epoch" event. Its curve is kept, its checkpoints are deleted."""


Listener = Callable[[Event], None]
