"""The paths an update can take, and which one a tensor takes.

Every path has the same two phases. ``reduce`` reads the gradients and the first moments and leaves
a few inner products per tensor; ``apply`` turns them into coefficients and writes the new moments
and parameters. Between the two, and only there, tensors may learn from one another: the global
gradient norm for ``clip_norm`` today, the other shards of a sharded layer tomorrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from aida._step.hyper import Hyper

if TYPE_CHECKING:
    from aida.backends.tables import TensorTable

Kind = str  #: "reference", "foreach" or "fused"


class Traits(NamedTuple):
    """What at least one run of a batch asks for."""

    clips: bool
    raises: bool
    has_l2: bool
    has_host_tensors: bool  #: a tensor lr in host memory, or tensor betas, which may change in place
    has_device_lr: bool


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
    groups: list[int] = field(default_factory=list)  #: the parameter group of each run
    #: Where the tensors lie. BatchCache makes it before a fused backend sees the batch.
    table: TensorTable = None  # type: ignore[assignment]
    #: Whether the step may be called off between the phases, by this batch or another.
    may_be_called_off: bool = False
    #: Set by torch.amp.GradScaler: gradients are this many times too large / some of them overflowed.
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    _traits: tuple[list[tuple[Hyper, int]], Traits] | None = None

    def __len__(self) -> int:
        return len(self.params)

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def traits(self) -> Traits:
        """Looked up once for each list of runs: with hundreds of groups, asking them all costs more than a launch."""
        if self._traits is None or self._traits[0] is not self.runs:
            hypers = [hyper for hyper, _ in self.runs]
            traits = Traits(
                clips=any(hyper.clip_norm is not None for hyper in hypers),
                raises=any(hyper.nonfinite == "raise" for hyper in hypers),
                has_l2=any(hyper.l2 != 0 for hyper in hypers),
                has_host_tensors=any(
                    hyper.has_tensor_betas or (isinstance(hyper.lr, Tensor) and hyper.lr.device.type == "cpu")
                    for hyper in hypers
                ),
                has_device_lr=any(isinstance(hyper.lr, Tensor) and hyper.lr.device.type != "cpu" for hyper in hypers),
            )
            self._traits = (self.runs, traits)
        return self._traits[1]

    def tensor_lists(self) -> tuple[list[Tensor], ...]:
        """The parallel lists, in the order of the fields."""
        return self.params, self.grads, self.exp_avgs, self.exp_avg_vars, self.steps, self.skipped

    def select(self, wanted: list[bool]) -> Batch:
        """Some of the tensors, without their values."""
        part = Batch()
        for mine, all_of_them in zip(part.tensor_lists(), self.tensor_lists(), strict=True):
            mine.extend(compress(all_of_them, wanted))
        return part

    def extend(self, other: Batch) -> None:
        for mine, more in zip(self.tensor_lists(), other.tensor_lists(), strict=True):
            mine.extend(more)
        self.runs.extend(other.runs)
        self.groups.extend(other.groups)

    def view_as_real(self) -> None:
        """Let complex tensors be updated as pairs of real numbers."""
        self.grads[:] = [grad.resolve_conj() for grad in self.grads]  # autograd sets the lazy conj bit on some
        for tensors in (self.params, self.grads, self.exp_avgs, self.exp_avg_vars):
            tensors[:] = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]

    def counts(self) -> list[int]:
        """How many tensors each run has."""
        return [count for _, count in self.runs]

    def may_change(self, finite: Tensor, hyper: Hyper) -> Tensor | None:
        """Which tensors may change in this step, of the shape of ``finite``; None where nothing could forbid it."""
        allowed = finite if hyper.nonfinite == "skip" else None
        if self.found_inf is not None:
            clean = (self.found_inf.reshape(()) == 0).expand(finite.shape)
            allowed = clean if allowed is None else allowed & clean
        return allowed

    def sits_out(self, finite: Tensor) -> Tensor:
        """Which tensors are to be counted as skipped: not those of a step that GradScaler lets pass as a whole."""
        return ~finite if self.found_inf is None else ~finite & (self.found_inf.reshape(()) == 0)

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


def sum_over_devices(norms: list[Tensor | None]) -> list[Tensor | None]:
    """The squared norm over all batches, for each batch on its own device."""
    known = [norm for norm in norms if norm is not None]
    if len(known) < 2:
        return list(norms)
    totals: list[Tensor | None] = []
    for norm in norms:
        if norm is None:
            totals.append(None)
        else:
            totals.append(torch.stack([n.to(norm.device, norm.dtype) for n in known]).sum())
    return totals
