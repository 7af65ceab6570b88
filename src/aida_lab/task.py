"""What the training loop knows of a task, and what a task knows of its run.

A task is an experiment on one device: modules, data, a training step and a measure. Everything random in
its data comes from (seed, epoch) through :func:`stream`, so that a run can go on in the middle of an epoch
without its past; dropout draws from torch's generators, whose state the checkpoint keeps.
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
    """Where and how a task is made."""

    spec: RunSpec
    device: torch.device
    data_root: Path | None = None
    #: A file of Inception weights, for the experiment that is measured with it.
    inception: Path | None = None
    #: Processes that decode images, for the experiment that reads files while it trains.
    workers: int = 4

    def autocast(self) -> torch.autocast:
        """The precision of the run, for a task to open around its network."""
        # no cache of cast weights: a CUDA graph would hold those of the step it was recorded in
        bf16 = self.spec.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False)


class Task(Protocol):
    """One experiment on one device."""

    #: Everything that is trained, by name; each gets an optimizer of its own. A checkpoint keeps them all.
    modules: Mapping[str, nn.Module]

    def begin_epoch(self, epoch: int) -> int:
        """Draw this epoch's order; returns its number of steps. Called again after a resume within the epoch."""

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """What step ``index`` of the epoch reads, on the device; equal shapes for steps of equal :meth:`kind`."""

    def kind(self, index: int) -> str:
        """Which step it is, where the code or the shapes of steps differ; each kind becomes a CUDA graph of its own."""

    def lr_factor(self, index: int) -> float:
        """A factor on the scheduled lr for this step alone."""

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        """Take one training step; returns the loss, detached. May be captured: no synchronisation, no host values."""

    def evaluate(self, final: bool) -> Mapping[str, float]:
        """The measures after an epoch; ``final`` after the last one of the run."""

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint needs beside modules and optimizers: tensors and plain values."""

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`extra_state` gave; tensors that a graph may hold are copied into, not replaced."""


def stream(seed: int, epoch: int, purpose: str) -> torch.Generator:
    """A generator on the CPU whose numbers depend on these three alone."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
