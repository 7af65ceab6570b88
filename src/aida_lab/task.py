"""The interface between the training loop and a task.

A task is an experiment on one device: modules, data, a training step and an evaluation. All randomness of its data
is drawn from (seed, epoch) by :func:`stream`, so a run can resume in the middle of an epoch. Dropout draws from
torch's generators; a checkpoint keeps their state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aida_lab.spec import RunSpec


@dataclass(frozen=True)
class TaskContext:
    """What a task is built from."""

    spec: RunSpec
    device: torch.device
    data_root: Path | None = None
    #: A file of Inception weights, for the experiment that measures FID.
    inception: Path | None = None
    #: Processes that decode images, for the experiment that reads image files while it trains.
    workers: int = 4

    def autocast(self) -> torch.autocast:
        """The run's precision, as a context for the forward pass."""
        # no cache of cast weights: a CUDA graph would keep those of the step in which it was captured
        bf16 = self.spec.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False)


class Task(Protocol):
    """One experiment on one device."""

    #: The trained modules by name. Each has its own optimizer, and a checkpoint keeps all of them.
    modules: Mapping[str, nn.Module]

    def begin_epoch(self, epoch: int) -> int:
        """Shuffle the data of this epoch; returns its number of steps. Called again if a run resumes in the epoch."""

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """The batch of step ``index`` of the epoch, on the device. Steps of equal :meth:`kind` have equal shapes."""

    def kind(self, index: int) -> str:
        """The kind of a step, if steps differ in code or shapes. Each kind is captured as its own CUDA graph."""

    def lr_factor(self, index: int) -> float:
        """A factor on the scheduled lr for this step only."""

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        """Take a training step; returns the detached loss. It may be captured, so it must not synchronize."""

    def evaluate(self, final: bool) -> Mapping[str, float]:
        """The metrics after an epoch. ``final`` is true after the last epoch of the run."""

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint needs besides modules and optimizers: tensors and plain values."""

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`extra_state`. Tensors that a CUDA graph may read are overwritten, not replaced."""


def stream(seed: int, epoch: int, purpose: str) -> torch.Generator:
    """A CPU generator seeded by these three values alone."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
