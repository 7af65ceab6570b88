"""The paths of an update: what each one is given, and what it must do.

Every path has the same two phases. ``reduce`` reads the gradients and the first moments and returns a
few inner products per tensor. ``apply`` takes them, computes the coefficients and writes the new moments
and parameters. Tensors depend on one another only between the two phases: ``clip_norm`` needs the
gradient norm over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida._step.layers import ONE_LAYER, Layers
from aida._step.sharding import Span
from aida._step.storage import FULL, NO_STREAM, Storage, Stream, layer_stream, places
from aida.rounding import BLOCK

if TYPE_CHECKING:
    from aida.backends.exchange import Exchange
    from aida.backends.tables import PointerTable

Kind = str  #: "reference", "foreach" or "fused"


class Traits(NamedTuple):
    """What at least one run of a batch needs."""

    clips: bool
    raises: bool
    has_l2: bool
    has_host_tensors: bool  #: lr in host memory or betas are tensors, which may change in place
    has_device_lr: bool


class Origin(NamedTuple):
    """The parameter that a tensor of a batch belongs to."""

    param: Tensor  #: as in the parameter group; a DTensor if it is sharded
    layers: Layers = ONE_LAYER
    span: Span | None = None  #: the ranks that share it
    slot: int = 0  #: of its first layer in the exchange of these ranks
    storage: Storage = FULL
    stream: Stream = NO_STREAM  #: where its random bits are


@dataclass(slots=True)
class Batch:
    """Tensors that one backend updates together, as parallel lists over all parameter groups.

    Each tensor is one layer, or the part of it on this rank. A run is a sequence of tensors with the same
    hyper-parameters: the first ``runs[0][1]`` tensors use ``runs[0][0]``, the next ``runs[1][1]`` use ``runs[1][0]``,
    and so on.
    """

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_vars: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    skipped: list[Tensor] = field(default_factory=list)
    #: Of 8-bit state, whose codes are in ``exp_avgs`` (m) and ``exp_avg_vars`` (the root of v); else None.
    exp_avg_scales: list[Any] = field(default_factory=list)
    exp_avg_var_scales: list[Any] = field(default_factory=list)
    #: What rounding removed from the parameters, with ``kahan_sum``; else None.
    compensations: list[Any] = field(default_factory=list)
    runs: list[tuple[Hyper, int]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  #: the parameter group of each run
    origins: list[Origin] = field(default_factory=list)  #: one per parameter
    #: The local tensors of the parameters, if a parameter has several layers; the lists above then hold views of them.
    #: Kernels find the layers' gradients by address: in a fused batch ``grads`` holds the parameters' gradients.
    wholes: Batch | None = None
    dtensors: list[Tensor] = field(default_factory=list)  #: the parameters that are DTensors
    #: Adds the sums of this batch over the ranks that share its parameters; None if no other rank has a part of them.
    exchange: Exchange | None = None
    #: BatchCache numbers the batch's tensors and its runs. Equal numbers mean the same tensors, or the same runs.
    generation: int = -1
    values_generation: int = -1
    #: The addresses of the tensors. BatchCache makes it before a fused backend sees the batch.
    table: PointerTable = None  # type: ignore[assignment]
    #: Whether the step may raise between the phases, because of this batch or another.
    may_abort: bool = False
    #: Set by torch.amp.GradScaler: the factor to divide out of the gradients, and whether one of them overflowed.
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    _traits: Traits | None = None

    def __len__(self) -> int:
        return len(self.params)

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def traits(self) -> Traits:
        """Computed once per list of runs: over hundreds of groups it takes longer than a kernel launch."""
        if self._traits is None:
            hypers = [hyper for hyper, _ in self.runs]
            self._traits = Traits(
                clips=any(hyper.clip_norm is not None for hyper in hypers),
                raises=any(hyper.nonfinite == "raise" for hyper in hypers),
                has_l2=any(hyper.l2 != 0 for hyper in hypers),
                has_host_tensors=any(
                    hyper.has_tensor_betas or (isinstance(hyper.lr, Tensor) and hyper.lr.device.type == "cpu")
                    for hyper in hypers
                ),
                has_device_lr=any(isinstance(hyper.lr, Tensor) and hyper.lr.device.type != "cpu" for hyper in hypers),
            )
        return self._traits

    def set_hypers(self, hypers: list[Hyper], generation: int) -> None:
        """Replace the hyper-parameters of every run. ``hypers`` has one entry per parameter group."""
        self.runs = [(hypers[group], count) for group, count in zip(self.groups, self.counts(), strict=True)]
        self.values_generation, self._traits = generation, None

    @property
    def storage(self) -> Storage:
        return self.origins[0].storage if self.origins else FULL

    def tensor_lists(self) -> tuple[list[Tensor], ...]:
        """The parallel lists that hold tensors, in the order of the rows of a pointer table."""
        always, added = self.rows()[:6], self.rows()[6:]
        return *always, *(one for one in added if one and one[0] is not None)

    def rows(self) -> tuple[list[Any], ...]:
        """All parallel lists."""
        return (
            self.params, self.grads, self.exp_avgs, self.exp_avg_vars, self.steps, self.skipped,
            self.exp_avg_scales, self.exp_avg_var_scales, self.compensations,
        )  # fmt: skip

    def select(self, wanted: list[bool]) -> Batch:
        """Some of the tensors, without their runs."""
        part = Batch()
        for mine, all_of_them in zip(part._lists(), self._lists(), strict=True):
            mine.extend(compress(all_of_them, wanted))
        return part

    def extend(self, other: Batch) -> None:
        for mine, more in zip(self._lists(), other._lists(), strict=True):
            mine.extend(more)
        self.runs.extend(other.runs)
        self.groups.extend(other.groups)
        self._traits = None

    def _lists(self) -> tuple[list[Any], ...]:
        return *self.rows(), self.origins

    def by_layer(self) -> Batch:
        """The batch with one entry per layer instead of one per parameter."""
        cuts = [origin.layers for origin in self.origins]
        batch = Batch(origins=self.origins, dtensors=self.dtensors, exchange=self.exchange, wholes=self)
        for mine, tensors in zip(batch.rows()[:4], self.rows()[:4], strict=True):
            mine += cut(cuts, tensors)
        for mine, tensors in zip(batch.rows()[4:6], self.rows()[4:6], strict=True):
            mine += [view for layers, t in zip(cuts, tensors, strict=True) for view in layers.counters(t)]
        for mine, scales in zip(batch.rows()[6:8], self.rows()[6:8], strict=True):
            mine += [
                None if blocks is None else blocks.view(-1)[start // BLOCK : -(-(start + size) // BLOCK)]
                for blocks, places in zip(scales, self._places(), strict=True)
                for start, size in places
            ]
        for layers, tensor in zip(cuts, self.compensations, strict=True):
            batch.compensations += [None] * len(layers.numbers) if tensor is None else layers.views(tensor)
        for group, (hyper, where) in zip(self.groups, self.slices(), strict=True):
            count = sum(len(layers.numbers) for layers in cuts[where])
            if count:
                batch.runs.append((hyper, count))
                batch.groups.append(group)
        return batch

    def _places(self) -> list[list[tuple[Any, int]]]:
        """Start and size of each parameter's layers, in elements from its start."""
        wholes = zip(self.origins, self.exp_avgs, strict=True)
        return [places(origin.layers.views(whole), whole) for origin, whole in wholes]

    def streams(self) -> list[Stream]:
        """Where the random bits of each tensor are."""
        if self.wholes is None:
            return [origin.stream for origin in self.origins]
        return [
            layer_stream(origin.stream, start, size, whole.numel())
            for origin, whole, places in zip(self.origins, self.wholes.exp_avgs, self.wholes._places(), strict=True)
            for start, size in places
        ]

    def layer_origins(self) -> list[tuple[Origin, int]]:
        """The parameter of each tensor, and the layer's number in it."""
        return [(origin, number) for origin in self.origins for number in origin.layers.numbers]

    def view_as_real(self) -> None:
        """View complex tensors as pairs of real numbers."""
        self.grads[:] = [grad.resolve_conj() for grad in self.grads]  # autograd sets the lazy conj bit on some
        for tensors in (self.params, self.grads, self.exp_avgs, self.exp_avg_vars):
            tensors[:] = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]

    def counts(self) -> list[int]:
        """The number of tensors per run."""
        return [count for _, count in self.runs]

    def may_change(self, finite: Tensor, hyper: Hyper) -> Tensor | None:
        """Mask of the tensors that this step updates, with the shape of ``finite``; None if it updates all of them."""
        allowed = finite if hyper.nonfinite == "skip" else None
        if self.found_inf is not None:
            clean = (self.found_inf.reshape(()) == 0).expand(finite.shape)
            allowed = clean if allowed is None else allowed & clean
        return allowed

    def counts_as_skipped(self, finite: Tensor) -> Tensor:
        """Mask of the tensors to count as skipped; none if GradScaler skips the whole step."""
        return ~finite if self.found_inf is None else ~finite & (self.found_inf.reshape(()) == 0)

    def slices(self) -> Iterator[tuple[Hyper, slice]]:
        """The hyper-parameters of each run, and the slice of the lists that it covers."""
        start = 0
        for hyper, count in self.runs:
            yield hyper, slice(start, start + count)
            start += count


def cut(layers: list[Layers], tensors: list[Tensor]) -> list[Tensor]:
    """The layers of some parameters' local tensors."""
    return [view for one, tensor in zip(layers, tensors, strict=True) for view in one.views(tensor)]


class Reduced(Protocol):
    """What ``reduce`` returns and ``apply`` of the same backend takes.

    If the batch has an exchange, the sums are those of this rank. The exchange writes those over all ranks into
    ``sums``, and ``finite``, before ``apply``.
    """

    @property
    def squared_norm(self) -> Tensor | None:
        """Squared norm of the gradients whose group clips, 0-dim on the batch's device; None if no group clips.

        It is the norm after ``grad_scale`` is divided out. With ``nonfinite="skip"`` it leaves out tensors
        whose gradient holds NaN or inf. None too if the batch has an exchange, which computes it.
        """

    @property
    def sums(self) -> Tensor:
        """The inner products in float64, one row of ``columns.PRODUCT_COLUMNS`` per tensor."""

    @property
    def finite(self) -> Tensor:
        """Whether the gradient of each tensor can be used."""

    def nonfinite(self) -> list[int]:
        """Indices of the tensors whose gradient holds NaN or inf. Synchronizes with the device."""


class Backend(Protocol):
    """One path of the update. An instance belongs to one optimizer and may keep tables between steps."""

    def reduce(self, batch: Batch) -> Reduced:
        """Phase one: the inner products of every tensor. Changes no tensor of the batch but counters."""

    def apply(self, batch: Batch, reduced: Any, squared_norm: Tensor | None) -> None:
        """Phase two: new moments and parameters, with the squared norm over all batches."""


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype of per-tensor scalars: float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def sum_over_devices(
    norms: list[Tensor | None], batches: list[Batch], shared: Sequence[Tensor | None] = ()
) -> list[Tensor | None]:
    """The squared norm over all batches and exchanges, once per batch, on its device. None if a batch does not clip."""
    known = [norm for norm in (*norms, *shared) if norm is not None]
    if not known or (not shared and len(known) == 1):
        return norms
    return [
        torch.stack([n.to(batch.device, known[0].dtype) for n in known]).sum() if batch.traits.clips else None
        for batch in batches
    ]
