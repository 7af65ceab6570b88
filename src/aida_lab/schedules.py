"""Learning-rate schedules: each gives the factor on the base lr at a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """The factor on the base learning rate."""

    def factor(self, epoch: int, step: int, epochs: int) -> float:
        """At 0-based ``epoch`` of ``epochs`` and 0-based ``step`` of the whole run."""


@dataclass(frozen=True)
class Constant:
    """The base lr at every step."""

    def factor(self, epoch: int, step: int, epochs: int) -> float:
        return 1.0


@dataclass(frozen=True)
class StepDecay:
    """Multiply the lr by ``by`` at the start of each 0-based epoch in ``at``, for runs of ``of`` epochs.

    A run of another length decays at the same fractions of its length.
    """

    at: tuple[int, ...]
    of: int
    by: float = 0.1

    def factor(self, epoch: int, step: int, epochs: int) -> float:
        # integers: 0.8 * 200 is not 160 in floating point
        passed = sum(epoch * self.of >= start * epochs for start in self.at)
        return float(self.by**passed)


@dataclass(frozen=True)
class WarmUp:
    """Linear warm-up over the first ``steps`` steps, then another schedule."""

    then: Schedule
    steps: int

    def factor(self, epoch: int, step: int, epochs: int) -> float:
        return min(1.0, (step + 1) / self.steps) * self.then.factor(epoch, step, epochs)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up over the first ``warmup`` steps, then half a cosine down to ``floor`` of the base lr.

    The run has ``per_epoch`` steps per epoch.
    """

    warmup: int
    per_epoch: int
    floor: float = 0.1

    def factor(self, epoch: int, step: int, epochs: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.per_epoch * epochs - self.warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Restarted:
    """Another schedule, restarted at its full learning rate after ``epoch`` epochs: only later decays apply."""

    then: Schedule
    epoch: int

    def factor(self, epoch: int, step: int, epochs: int) -> float:
        return self.then.factor(epoch, step, epochs) / self.then.factor(self.epoch - 1, step, epochs)


@dataclass(frozen=True)
class Undecayed:
    """The warm-up of another schedule, then the learning rate that it ends with."""

    then: Schedule

    def factor(self, epoch: int, step: int, epochs: int) -> float:
        return self.then.factor(0, min(step, max(1, getattr(self.then, "warmup", 1)) - 1), epochs)


@dataclass(frozen=True)
class InverseSquareRoot:
    """The transformer's ``scale * d_model^-1/2 * min(n^-1/2, n * warmup^-3/2)`` at the n-th step, n from 1.

    This is the learning rate for a base lr of ``reference``, which the paper uses for adaptive methods. Another
    base lr scales it in proportion.
    """

    d_model: int
    warmup: int
    scale: float
    reference: float = 1e-3

    def factor(self, epoch: int, step: int, epochs: int) -> float:
        n = step + 1
        lr: float = self.scale * self.d_model**-0.5 * min(n**-0.5, n * self.warmup**-1.5)
        return lr / self.reference
