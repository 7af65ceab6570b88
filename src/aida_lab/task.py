"""The interface between the training loop and a task.

A task is an experiment on one device: modules, data, a training step and an evaluation. All randomness of its data
is drawn from (seed, epoch) by :func:`stream`, so a run can resume in the middle of an epoch. Dropout draws from
torch's generators; a checkpoint keeps their state.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aida_lab.spec import RunSpec

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TaskContext:
    """What a task is built from."""

    spec: RunSpec
    device: torch.device
    data_root: Path | None = None
    inception: Path | None = None  #: a file of Inception weights, for the experiment that measures FID
    workers: int = 4  #: processes that decode images, for the experiment that reads image files while it trains

    def autocast(self) -> torch.autocast:
        """The run's precision, as a context for the forward pass."""
        # no cache of cast weights: a CUDA graph would keep those of the step in which it was captured
        bf16 = self.spec.precision in ("bf16", "bf16-true")
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False)


class Task(ABC):
    """One experiment on one device.

    Args:
        context: the run's spec and device.
        modules: the trained modules by name. Each has its own optimizer, and a checkpoint keeps all of them.
    """

    def __init__(self, context: TaskContext, **modules: nn.Module) -> None:
        self._context, self._spec, self._device = context, context.spec, context.device
        dtype = torch.bfloat16 if context.spec.precision == "bf16-true" else None
        self.modules: Mapping[str, nn.Module] = {name: each.to(context.device, dtype) for name, each in modules.items()}

    @abstractmethod
    def begin_epoch(self, epoch: int) -> int:
        """Shuffle the data of this epoch; returns its number of steps. Called again if a run resumes in the epoch."""

    @abstractmethod
    def batch(self, index: int) -> tuple[Tensor, ...]:
        """The batch of step ``index`` of the epoch, on the device. Steps of equal :meth:`kind` have equal shapes."""

    @abstractmethod
    def kind(self, index: int) -> str:
        """The kind of a step, if steps differ in code or shapes. Each kind is captured as its own CUDA graph."""

    @abstractmethod
    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        """Take a training step; returns the detached loss. It may be captured, so it must not synchronize."""

    @abstractmethod
    def evaluate(self, final: bool) -> Mapping[str, float]:
        """The metrics after an epoch. ``final`` is true after the last epoch of the run."""

    def lr_factor(self, index: int) -> float:
        """A factor on the scheduled lr for this step only."""
        return 1.0

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint needs besides modules and optimizers: tensors and plain values."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most tasks have none
        """Restore :meth:`extra_state`. Tensors that a CUDA graph may read are overwritten, not replaced."""

    def _shuffled(self, count: int, epoch: int) -> Tensor:
        """The order of the training examples in an epoch."""
        return torch.randperm(count, generator=stream(self._spec.seed, epoch, "order"))

    def _limited(self, count: int) -> int:
        """The number of examples, at most ``count``, that an epoch or an evaluation reads."""
        limit = self._spec.limit
        return count if limit is None else min(count, limit * self._spec.batch)

    def _compiled(self, loss: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """The function, compiled if the run's spec says so."""
        return torch.compile(loss, dynamic=False) if self._spec.compiled else loss


def backward_and_step(optimizer: Optimizer, loss: Tensor, clip: float | None = None) -> Tensor:
    """Backward, clip the global gradient norm, step. Returns the detached loss. Gradients must be None before."""
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    return loss.detach()


def perplexity(loss: float) -> float:
    """exp(loss) for a mean cross entropy in nats. The loss is capped at 100, so that the result stays finite."""
    return math.exp(min(loss, 100.0))


def stream(seed: int, epoch: int, purpose: str) -> torch.Generator:
    """A CPU generator seeded by these three values alone."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
