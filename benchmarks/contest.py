"""A round of the benchmark: several optimizers on one workload, their samples taken in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

import torch

from clock import (
    GradientSets,
    Place,
    Subject,
    assignment_sample,
    capture,
    cpu_sample,
    eager_sample,
    graph_sample,
    host_sample,
    make_gradients,
    peak_temporary,
    queued_sample,
    steps_in,
    unplaced,
)
from machine import available_memory
from results import Entry, Workload
from rivals import Rival
from shapes import elements

#: The row that shows what all queued rows contain besides the step.
ASSIGNMENT = "(assigning the gradients alone)"

#: Seconds a sample on a GPU may last: long against the clock, short against the drift of a machine.
WINDOW = 0.1

#: Part of the free memory that all optimizers together may take; beyond, they run one after another.
MEMORY_SHARE = 0.6


@dataclass
class Lane:
    """One optimizer during a round: how it takes a sample, and what it has so far."""

    rival: Rival
    workload: Workload
    subject: Subject | None = None
    take: Callable[[], float] | None = None
    samples: list[float] = field(default_factory=list)
    steps: int | None = None
    peak: float | None = None
    error: str | None = None

    def sample(self) -> None:
        if self.take is None:
            return
        try:
            self.samples.append(self.take())
        except Exception as error:  # a rival that breaks is a result: it belongs in the table
            self.fail(error)

    def fail(self, error: Exception | str) -> None:
        if isinstance(error, ModuleNotFoundError):
            self.error = f"{error.name} is not installed"
        elif isinstance(error, torch.OutOfMemoryError):
            self.error = "out of memory"
        else:
            self.error = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error
        self.leave()

    def leave(self) -> None:
        """Give back what the optimizer holds."""
        self.take = self.subject = None

    def entry(self, mode: str) -> Entry:
        return Entry(
            self.workload.label, mode, self.rival.name, elements(self.workload.shapes), self.workload.groups,
            self.rival.bytes_per_param, self.samples, self.steps, self.peak, self.error,
        )  # fmt: skip


@dataclass(frozen=True)
class Round:
    """How a round is run."""

    mode: str
    device: torch.device
    repeats: int
    steps: int  #: at most so many a sample on a GPU
    deadline: float  #: by time.monotonic()
    progress: Callable[[str], None]
    place: Place = unplaced
    interleave: bool | None = None  #: whether all optimizers are held at once; None asks the free memory

    def run(self, rivals: list[Rival], workloads: list[Workload]) -> list[Entry]:
        """Measure every rival on every workload; the workloads of a round differ in their groups alone."""
        shapes = workloads[0].shapes
        lanes = [Lane(rival, workload) for workload in workloads for rival in rivals]
        gradients = make_gradients(shapes, self.device, self.place)
        needed = len(lanes) * 3 * 4 * elements(shapes)  # parameters and two moments in float32
        fits = needed < MEMORY_SHARE * available_memory(self.device) if self.interleave is None else self.interleave
        if fits:
            self._interleave(lanes, gradients)
        else:
            self.progress("  too large to hold every optimizer at once: one after another, there and back")
            self._take_turns(lanes, gradients)
        entries = [lane.entry(self.mode) for lane in lanes]
        if self.mode == "queued":
            entries.append(self._assignment(workloads[0], gradients))
        return entries

    def _interleave(self, lanes: list[Lane], gradients: GradientSets) -> None:
        """One sample of each in turn, again and again: whatever the machine does, it does to all."""
        for lane in lanes:
            self._prepare(lane, gradients)
        for repeat in range(self.repeats):
            with _no_collection():
                for lane in lanes:
                    lane.sample()
            if monotonic() > self.deadline:
                self.progress(f"  time is up after {repeat + 1} of {self.repeats} repeats")
                break
        for lane in lanes:
            lane.leave()
        _release(self.device)

    def _take_turns(self, lanes: list[Lane], gradients: GradientSets) -> None:
        """Build, measure and free one after another, then once more backwards: a drift hits all alike."""
        for order in (lanes, lanes[::-1]):
            for lane in order:
                if lane.error is not None:
                    continue
                self._prepare(lane, gradients)
                with _no_collection():
                    for _ in range(-(-self.repeats // 2)):
                        lane.sample()
                lane.leave()
                _release(self.device)

    def _prepare(self, lane: Lane, gradients: GradientSets) -> None:
        """Build the optimizer, warm it up, and leave in the lane a way to take samples."""
        self.progress(f"  {lane.rival.name}")
        if self.mode == "graph" and not lane.rival.graph:
            lane.fail("not measured in a CUDA graph")
        elif monotonic() > self.deadline:
            if not lane.samples:
                lane.fail("not measured: the budget was spent")
        else:
            try:
                lane.subject = Subject(lane.rival, lane.workload, gradients, self.mode == "graph", self.place)
                self._make_ready(lane, lane.subject)
            except Exception as error:  # not installed, out of memory, unsupported: it belongs in the table
                lane.fail(error)
        if lane.error is not None:
            self.progress(f"    {lane.error}")

    def _make_ready(self, lane: Lane, subject: Subject) -> None:
        if self.mode == "graph":
            graph = capture(subject)
            steps = lane.steps = steps_in(WINDOW, lambda count: graph_sample(graph, count), self.steps)
            lane.take = lambda: graph_sample(graph, steps)
            return
        subject.warm_up()
        if self.device.type == "cuda":
            lane.peak = peak_temporary(subject) / (4 * elements(lane.workload.shapes))
            sample = {"host": host_sample, "eager": eager_sample, "queued": queued_sample}[self.mode]
            steps = lane.steps = steps_in(WINDOW, lambda count: sample(subject, count), self.steps)
            lane.take = lambda: sample(subject, steps)
        else:
            steps = lane.steps = 1 if self.mode == "eager" else self.steps
            lane.take = (
                (lambda: cpu_sample(subject, len(lane.samples)))
                if self.mode == "eager"
                else (lambda: host_sample(subject, steps))
            )

    def _assignment(self, workload: Workload, gradients: GradientSets) -> Entry:
        lane = Lane(Rival(ASSIGNMENT, lambda groups, _: torch.optim.SGD(groups), 0), workload, steps=self.steps)
        subject = Subject(lane.rival, workload, gradients, False, self.place)
        lane.samples = [assignment_sample(subject, self.steps) for _ in range(self.repeats)]
        return lane.entry(self.mode)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of the samples."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
