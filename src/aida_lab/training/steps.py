"""Training steps: eager, or captured once as a CUDA graph and replayed.

Both give the same numbers. Each kind of step is captured after a few eager steps. These are steps of the run like all
others; they create the optimizer's state, cuDNN's plans and the compiled code, which a capture requires.
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

#: Eager steps of a kind before it is captured. A kind that occurs less often is never captured.
PLAIN_STEPS = 3


class PlainSteps:
    """Eager steps."""

    name = "plain"

    def __init__(self, task: Task, optimizers: Mapping[str, Optimizer]) -> None:
        self._task, self._optimizers = task, optimizers

    def __call__(self, kind: str, batch: tuple[Tensor, ...]) -> Tensor:
        with warnings.catch_warnings():
            # torch warns if a capturable optimizer is not captured: it will be, or it must give the same bits
            warnings.filterwarnings("ignore", message=".*capturable=True.*")
            return self._task.step(kind, batch, self._optimizers)


@dataclass(frozen=True)
class _Capture:
    graph: Any
    inputs: tuple[Tensor, ...]
    loss: Tensor
    #: The parameters and their gradients. Each graph writes to its own gradient tensors.
    grads: list[tuple[Tensor, Tensor | None]]


class GraphSteps(PlainSteps):
    """Each kind of step captured once and replayed: the host launches one graph instead of hundreds of kernels."""

    name = "graph"

    def __init__(self, task: Task, optimizers: Mapping[str, Optimizer]) -> None:
        super().__init__(task, optimizers)
        self._captures: dict[str, _Capture] = {}
        self._taken: Counter[str] = Counter()
        self._last: _Capture | None = None
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, kind: str, batch: tuple[Tensor, ...]) -> Tensor:
        capture = self._captures.get(kind)
        if capture is None:
            if self._taken[kind] < PLAIN_STEPS:
                self._taken[kind] += 1
                self._last = None
                return super().__call__(kind, batch)
            capture = self._captures[kind] = self._capture(kind, batch)
        torch._foreach_copy_(capture.inputs, batch)
        if capture is not self._last:  # .grad shows the gradients of this step
            self._last = capture
            for param, grad in capture.grads:
                param.grad = grad
        capture.graph.replay()
        return capture.loss

    def _capture(self, kind: str, batch: tuple[Tensor, ...]) -> _Capture:
        inputs = tuple(torch.empty_like(part).copy_(part) for part in batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            loss = self._task.step(kind, inputs, self._optimizers)
        params = [
            p for optimizer in self._optimizers.values() for group in optimizer.param_groups for p in group["params"]
        ]
        return _Capture(graph, inputs, loss, [(p, p.grad) for p in params])
