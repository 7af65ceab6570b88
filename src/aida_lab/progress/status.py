"""How far runs are, followed from their events: what a display shows, whatever it draws with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aida_lab.events import Event
from aida_lab.experiments import find_experiment
from aida_lab.progress.labels import labels
from aida_lab.spec import Metric, RunSpec

#: Events after which a run does no more, each with the style of its line.
STYLES = {"finished": "green", "diverged": "yellow", "skipped": "dim", "interrupted": "yellow", "failed": "red"}


#: Seconds after which less than an epoch tells the pace, too.
_SETTLED = 10.0


@dataclass
class Standing:
    """One run as its events tell it."""

    label: str
    metric: Metric
    epochs: int
    state: str = "waiting"
    #: Epochs done, and how much of the next.
    done: float = 0.0
    best: float | None = None
    best_epoch: int = 0
    last: float | None = None
    loss: float | None = None
    text: str = ""
    #: When this process began to work on it, and how much was done by then.
    began: float = 0.0
    done_before: float = 0.0

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
        if value is None:  # an experiment that is measured at its end alone
            return
        self.last = value
        if self.metric.improves(value, self.best):
            self.best, self.best_epoch = value, epoch

    @property
    def ended(self) -> bool:
        return self.state in STYLES

    def epoch_in_words(self) -> str:
        return f"epoch {int(self.done)}/{self.epochs}"

    def metric_in_words(self) -> str:
        if self.last is None:
            return "" if self.loss is None else f"loss {in_words(self.loss)}"
        best = "" if self.best is None else f", best {in_words(self.best)} ({self.best_epoch})"
        return f"{self.metric.key} {in_words(self.last)}{best}"

    def seconds_left(self, now: float) -> float | None:
        """From the pace since this process began; None before there is one."""
        return _left(now - self.began, self.done - self.done_before, self.epochs - self.done)


@dataclass
class Board:
    """All runs of one command."""

    clock: Callable[[], float] = time.monotonic
    runs: dict[str, Standing] = field(default_factory=dict)
    #: When the first run began: before that, processes started and no pace could be seen.
    began: float | None = None

    def expect(self, specs: Iterable[RunSpec]) -> None:
        """Runs that will come."""
        specs = list(specs)
        named = labels(specs)
        for spec in specs:
            metric = find_experiment(spec.experiment).metrics[spec.variant]
            self.runs[spec.key] = Standing(named[spec.key], metric, spec.epochs)

    def take(self, event: Event) -> Standing:
        run, now = self.runs[event.run], self.clock()
        if self.began is None and event.kind == "started":
            self.began = now
        run.take(event, now)
        return run

    def note(self, event: Event) -> str:
        """What a note says, with the run it is about; some are about none."""
        return f"{self.runs[event.run].label}: {event.text}" if event.run else event.text

    @property
    def ended(self) -> int:
        """Runs that need no more work; an interrupted run does."""
        return sum(run.ended and run.state != "interrupted" for run in self.runs.values())

    def done(self) -> float:
        """Epochs of all runs, in full of those to which none will be added."""
        open_ends = ("waiting", "running", "interrupted")
        return sum(run.done if run.state in open_ends else run.epochs for run in self.runs.values())

    def total(self) -> int:
        return sum(run.epochs for run in self.runs.values())

    def seconds_left(self) -> float | None:
        """From the pace of all runs together; what was done before this command does not count."""
        if self.began is None:
            return None
        worked = sum(run.done - run.done_before for run in self.runs.values() if run.began)
        to_do = sum(run.epochs - run.done for run in self.runs.values() if not run.ended)
        return _left(self.clock() - self.began, worked, to_do)


def _left(seconds: float, epochs: float, to_do: float) -> float | None:
    """From what was done in that time; the first steps of a run, slow as they are, tell nothing."""
    return seconds / epochs * to_do if epochs >= 1 or (epochs > 0 and seconds >= _SETTLED) else None


def in_words(value: float | None) -> str:
    """A measure with the digits that matter: ``93.41``, ``0.2183``; empty where there is none."""
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """``1:02:03``, ``2:03``; empty where it is not known."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
