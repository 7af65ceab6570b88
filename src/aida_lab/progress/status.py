"""The progress of runs, computed from their events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aida_lab.events import Event
from aida_lab.experiments import find_experiment
from aida_lab.progress.labels import labels
from aida_lab.spec import Metric, RunSpec

#: The style of each state of a run that is not printed plainly.
STYLES = {
    "finished": "green", "diverged": "yellow", "skipped": "dim", "interrupted": "yellow", "failed": "red",
    "running": "cyan", "damaged": "red",
}  # fmt: skip

#: Seconds after which the speed is known even before the first epoch ends.
_SETTLED = 10.0


@dataclass
class RunProgress:
    """The progress of one run."""

    label: str
    metric: Metric
    epochs: int
    state: str = "waiting"
    done: float = 0.0  #: completed epochs, with the fraction of the current one
    best: float | None = None
    best_epoch: int = 0
    last: float | None = None
    loss: float | None = None
    text: str = ""
    began: float = 0.0  #: when this process started it
    done_before: float = 0.0  #: epochs done before that

    def take(self, event: Event, now: float) -> None:
        if event.kind == "started":
            self.began, self.done_before = now, float(event.epoch)
        self.state = "running" if event.kind in ("started", "step", "epoch") else event.kind
        self.epochs = event.epochs or self.epochs
        self.done = max(self.done, event.epoch + event.share)
        self.text = event.text
        if event.kind == "epoch":
            self._measure(event.epoch, event.row)
        elif event.kind in ("finished", "diverged", "skipped") and "best" in event.row:
            self.best, self.last = event.row["best"], event.row["last"]
            self.best_epoch = event.row.get("best_epoch") or self.best_epoch

    def _measure(self, epoch: int, row: Any) -> None:
        self.loss = row.get("loss")
        value = row.get(self.metric.key)
        if value is None:  # some experiments are evaluated only at the end
            return
        self.last = value
        if self.metric.improves(value, self.best):
            self.best, self.best_epoch = value, epoch

    @property
    def ended(self) -> bool:
        return self.state not in ("waiting", "running")

    def epoch_in_words(self) -> str:
        return f"epoch {int(self.done)}/{self.epochs}"

    def metric_in_words(self) -> str:
        if self.last is None:
            return "" if self.loss is None else f"loss {in_words(self.loss)}"
        best = "" if self.best is None else f", best {in_words(self.best)} ({self.best_epoch})"
        return f"{self.metric.key} {in_words(self.last)}{best}"

    def in_words(self, now: float) -> tuple[str, str, str]:
        """The epoch, the metric and the time left; unknown ones are empty."""
        return self.epoch_in_words(), self.metric_in_words(), time_left(self.seconds_left(now))

    def seconds_left(self, now: float) -> float | None:
        """Estimated from the speed since this process started; None while it is unknown."""
        return _left(now - self.began, self.done - self.done_before, self.epochs - self.done)


@dataclass
class Board:
    """The progress of all runs of one command."""

    clock: Callable[[], float] = time.monotonic
    runs: dict[str, RunProgress] = field(default_factory=dict)
    began: float | None = None  #: when the first run started, after its process did

    def expect(self, specs: Iterable[RunSpec]) -> None:
        """Add runs that have not started; those that are there already stay as they are."""
        specs = [spec for spec in specs if spec.key not in self.runs]
        named = labels(specs)
        for spec in specs:
            metric = find_experiment(spec.experiment).metrics[spec.variant]
            self.runs[spec.key] = RunProgress(named[spec.key], metric, spec.epochs)

    def take(self, event: Event) -> RunProgress:
        run, now = self.runs[event.run], self.clock()
        if self.began is None and event.kind == "started":
            self.began = now
        run.take(event, now)
        return run

    def note(self, event: Event) -> str:
        """The text of a note, with the label of its run if it has one."""
        return f"{self.runs[event.run].label}: {event.text}" if event.run else event.text

    @property
    def ended(self) -> int:
        """Runs that need no more work; an interrupted run does."""
        return sum(run.ended and run.state != "interrupted" for run in self.runs.values())

    def done(self) -> float:
        """Completed epochs of all runs. A run that will not continue counts in full."""
        open_ends = ("waiting", "running", "interrupted")
        return sum(run.done if run.state in open_ends else run.epochs for run in self.runs.values())

    def total(self) -> int:
        return sum(run.epochs for run in self.runs.values())

    def seconds_left(self) -> float | None:
        """Estimated from the speed of all runs together since this command started."""
        if self.began is None:
            return None
        worked = sum(run.done - run.done_before for run in self.runs.values() if run.began)
        to_do = sum(run.epochs - run.done for run in self.runs.values() if not run.ended)
        return _left(self.clock() - self.began, worked, to_do)


def _left(seconds: float, epochs: float, to_do: float) -> float | None:
    """None until an epoch is done or some seconds passed: the first steps of a run are slow."""
    return seconds / epochs * to_do if epochs >= 1 or (epochs > 0 and seconds >= _SETTLED) else None


def in_words(value: float | None) -> str:
    """A number with four or more significant digits: ``93.41``, ``0.2183``; empty if there is none."""
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4g}"


def time_left(seconds: float | None) -> str:
    """``1:02:03 left``, ``2:03 left``; empty if it is unknown."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"


def age_in_words(seconds: float) -> str:
    """The time since a change: ``40 s``, ``12 min``, ``3 h``, ``5 d``."""
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"
