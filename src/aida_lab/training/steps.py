"""How a step of a task is taken: plainly, or as a CUDA graph that was recorded once.

Both give the same numbers. A graph is recorded for each kind of step after it was taken plainly a few
times: these are steps of the run like any other, and they make the optimizer's state, cuDNN's plans and
compiled code that a recording must find ready.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from aida_lab.task import Task

#: Plain steps of a kind before it is recorded; a kind that comes less often is not worth a recording.
PLAIN_STEPS = 3


class PlainSteps:
    """Each step as it is written."""

    name = "plain"

    def __init__(self, task: Task, optimizers: Mapping[str, Optimizer]) -> None:
        self._task, self._optimizers = task, optimizers

    def __call__(self, kind: str, batch: tuple[Tensor, ...]) -> Tensor:
        return _plain_step(self._task, kind, batch, self._optimizers)


@dataclass(frozen=True)
class _Recording:
    graph: Any
    inputs: tuple[Tensor, ...]
    loss: Tensor
    #: Where this graph writes its gradients: each graph has its own places.
    grads: list[tuple[Tensor, Tensor | None]]


class GraphSteps:
    """Each kind of step recorded once and replayed: the host launches one graph instead of hundreds of kernels."""

    name = "graph"

    def __init__(self, task: Task, optimizers: Mapping[str, Optimizer]) -> None:
        self._task, self._optimizers = task, optimizers
        self._recordings: dict[str, _Recording] = {}
        self._taken: Counter[str] = Counter()
        self._last: _Recording | None = None
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, kind: str, batch: tuple[Tensor, ...]) -> Tensor:
        recording = self._recordings.get(kind)
        if recording is None:
            if self._taken[kind] < PLAIN_STEPS:
                self._taken[kind] += 1
                self._last = None
                return _plain_step(self._task, kind, batch, self._optimizers)
            recording = self._recordings[kind] = self._record(kind, batch)
        torch._foreach_copy_(recording.inputs, batch)
        if recording is not self._last:  # who looks at gradients between steps finds those of this one
            self._last = recording
            for param, grad in recording.grads:
                param.grad = grad
        recording.graph.replay()
        return recording.loss

    def _record(self, kind: str, batch: tuple[Tensor, ...]) -> _Recording:
        inputs = tuple(torch.empty_like(part).copy_(part) for part in batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            loss = self._task.step(kind, inputs, self._optimizers)
        params = [
            p for optimizer in self._optimizers.values() for group in optimizer.param_groups for p in group["params"]
        ]
        return _Recording(graph, inputs, loss, [(p, p.grad) for p in params])


Steps = PlainSteps | GraphSteps


def _plain_step(task: Task, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
    with warnings.catch_warnings():
        # torch asks whether a capturable optimizer was meant to be captured: it is, or it must agree with one that is
        warnings.filterwarnings("ignore", message=".*capturable=True.*")
        return task.step(kind, batch, optimizers)
