"""The paths an update can take, and which one a tensor takes.

Every path has the same two phases. ``reduce`` reads the gradients and the first moments and leaves
a few inner products per tensor; ``apply`` turns them into coefficients and writes the new moments
and parameters. Between the two, and only there, tensors may learn from one another: the global
gradient norm for ``clip_norm`` today, the other shards of a sharded layer tomorrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from aida.hyper import Hyper

Kind = str  #: "reference", "foreach" or "fused"


@dataclass(slots=True)
class Batch:
    """Tensors that one backend updates together, as parallel lists over all parameter groups.

    ``runs`` says whose values apply: the first ``runs[0][1]`` tensors use ``runs[0][0]``, the next
    ``runs[1][1]`` use ``runs[1][0]``, and so on.
    """

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_vars: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    skipped: list[Tensor] = field(default_factory=list)
    runs: list[tuple[Hyper, int]] = field(default_factory=list)
    #: Set by torch.amp.GradScaler: gradients are this many times too large / some of them overflowed.
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __len__(self) -> int:
        return len(self.params)

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def slices(self) -> Iterator[tuple[Hyper, slice]]:
        """Each run's values and where its tensors lie in the lists."""
        start = 0
        for hyper, count in self.runs:
            yield hyper, slice(start, start + count)
            start += count


class Backend(Protocol):
    """One path of the update. An instance belongs to one optimizer and may keep tables between steps."""

    def reduce(self, batch: Batch) -> Tensor | None:
        """Phase one. Returns the squared norm of the gradients whose group clips, None where none does.

        It stays on the batch's device (0-dim), counts finite tensors only where ``nonfinite="skip"``,
        and is of the true gradient, ``grad_scale`` taken out.
        """

    def nonfinite(self) -> list[int]:
        """Which tensors of the reduced batch hold NaN or inf. Waits for the device."""

    def apply(self, batch: Batch, squared_norm: Tensor | None) -> None:
        """Phase two, with the squared norm over *all* batches."""


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Scalars per tensor are followed in float64; Apple's GPUs have none."""
    return torch.float32 if device.type == "mps" else torch.float64
