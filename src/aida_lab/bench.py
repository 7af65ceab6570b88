"""Measure the time of an epoch for each optimizer, as in the paper's "t. c." columns.

All runs are built first and train their epochs in turn, so that a machine that slows down slows all of them. The
first epochs, in which code is compiled and graphs are captured, do not count.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch.utils.benchmark import Timer

from aida_lab.runs.records import read_curve
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.training.environment import choose_device, describe
from aida_lab.training.loop import Training
from aida_lab.training.options import Options
from aida_lab.training.run import own_stream
from aida_lab.training.steps import GraphSteps
from aida_lab.workers.jobs import Jobs

#: Epochs that do not count, at the start of a run.
WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """Seconds of the epochs of one method, for training and for evaluation."""

    experiment: str
    method: str
    precision: str
    compiled: bool
    jobs: int  #: runs that shared the device
    steps: int  #: per epoch
    seconds: tuple[float, ...]
    eval_seconds: tuple[float, ...]
    optimizer_seconds: float | None = None  #: of one step of the optimizer alone; None if runs share the device

    @property
    def share(self) -> float | None:
        """The optimizer's share of the training time."""
        return None if self.optimizer_seconds is None else self.optimizer_seconds * self.steps / self.training

    @property
    def epoch(self) -> float:
        """Median seconds of an epoch with its evaluation, divided by the number of runs at the same time."""
        return statistics.median(a + b for a, b in zip(self.seconds, self.eval_seconds, strict=True)) / self.jobs

    @property
    def training(self) -> float:
        """Median seconds of an epoch without evaluation, divided by the number of runs at the same time."""
        return statistics.median(self.seconds) / self.jobs

    @property
    def spread(self) -> float:
        """Half the interquartile range of the training seconds, relative to their median."""
        if len(self.seconds) < 2:
            return 0.0
        first, middle, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (third - first) / 2 / middle


class NotTimed(Exception):  # noqa: N818 - a result, not an error
    """There is no valid time: a run failed, or its loss was not finite."""


def side_by_side(
    specs: Sequence[RunSpec], epochs: int, options: Options, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Timing], dict[str, Any]]:
    """Train all specs in this process, one epoch of each in turn; returns their times and the machine."""
    # all models share their code, and torch stops compiling it after cache_size_limit versions
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 8 * len(specs))
    with own_stream(choose_device(options.device)):
        trainings = []
        for spec in specs:
            say(f"{spec.experiment}, {spec.method}: building")
            trainings.append(Training(spec, options))
        rows: list[list[dict[str, Any]]] = [[] for _ in specs]
        for epoch in range(WARM_UP + epochs):
            for training, kept in zip(trainings, rows, strict=True):
                say(f"{training.spec.experiment}, {training.spec.method}: epoch {epoch + 1} of {WARM_UP + epochs}")
                kept.append(training.train_epoch())
        machine = describe(trainings[0].device, trainings[0].steps.name)
        timings = [
            replace(_timing(training.spec, 1, kept[WARM_UP:]), optimizer_seconds=optimizer_seconds(training))
            for training, kept in zip(trainings, rows, strict=True)
        ]
    return timings, machine


def optimizer_seconds(training: Training) -> float:
    """Median seconds of a step of the run's optimizers alone, on the gradients of its last step.

    As in training, a step is the replay of a CUDA graph if the run's steps are.
    """

    def step() -> None:
        for optimizer in training.optimizers.values():
            optimizer.step()

    taken = step
    if isinstance(training.steps, GraphSteps):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step()
        taken = graph.replay
    # waits for the GPU after each block of steps
    timer = Timer("step()", globals={"step": taken}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange().median


def at_once(spec: RunSpec, jobs: int, epochs: int, options: Options, say: Callable[[str], None]) -> Timing:
    """Train one spec with ``jobs`` seeds at the same time; the epochs of all runs count."""
    specs = [replace(spec, seed=spec.seed + job, epochs=WARM_UP + epochs + 1) for job in range(jobs)]
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aida-bench-")))
        stop = stack.enter_context(Stop(lambda: None))
        work = Jobs(out, options, jobs).work(specs, lambda event: say(event.text) if event.text else None, stop)
        others = [outcome for outcome in work if outcome.state != "finished"]
        if others:  # then fewer runs shared the device
            why = others[0].error or others[0].state
            raise NotTimed(f"{spec.experiment}, {spec.method}: {len(others)} of {jobs} runs did not finish: {why}")
        # at the start and at the end, fewer runs share the device: the epochs in between count
        rows = [row for each in specs for row in read_curve(out / each.key)[WARM_UP:-1]]
    return _timing(spec, jobs, rows)


def as_json(timings: Sequence[Timing], machine: dict[str, Any]) -> dict[str, Any]:
    return {"machine": machine, "timings": [asdict(each) for each in timings]}


def as_markdown(timings: Sequence[Timing]) -> str:
    """A table with one row per method: seconds per epoch, and their ratio to AdamW in the same experiment."""
    lines = [
        "| experiment | method | precision | at once | s per epoch | with evaluation | against AdamW | optimizer "
        "| epochs |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    adamw = {(each.experiment, each.jobs): each.training for each in timings if each.method == "adamw"}
    for each in timings:
        reference = adamw.get((each.experiment, each.jobs))
        ratio = "" if reference is None else f"{each.training / reference:.3f}×"
        share = "" if each.share is None else f"{each.share:.1%}"
        precision = each.precision + (", compiled" if each.compiled else "")
        lines.append(
            f"| {each.experiment} | {each.method} | {precision} | {each.jobs} "
            f"| {each.training:.4f} ± {each.spread:.1%} | {each.epoch:.4f} | {ratio} | {share} | {len(each.seconds)} |"
        )
    return "\n".join(lines)


def _timing(spec: RunSpec, jobs: int, rows: Sequence[dict[str, Any]]) -> Timing:
    if not all(math.isfinite(row["loss"]) for row in rows):
        raise NotTimed(f"{spec.experiment}, {spec.method}: the loss is not finite")
    seconds, eval_seconds = (tuple(row[key] for row in rows) for key in ("seconds", "eval_seconds"))
    steps = rows[0]["step"] // rows[0]["epoch"]
    return Timing(spec.experiment, spec.method, spec.precision, spec.compiled, jobs, steps, seconds, eval_seconds)
