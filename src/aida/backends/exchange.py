"""Adds the inner products of sharded layers over the ranks that hold their parts: one all-reduce per step.

Every layer of every sharded parameter has a fixed slot in one buffer, whether or not it has a gradient in this step
and whichever rank holds it. So all ranks send buffers of the same shape in the same order. Afterwards each rank knows
the sums of all layers, and all ranks take the same decisions: which layers skip this step, and the gradient norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida._step.layers import Layers
from aida._step.sharding import Span, process_group
from aida.backends import Batch, Reduced
from aida.backends.capture import NO_EAGER_STEP
from aida.backends.columns import PRODUCT_COLUMNS

GG = PRODUCT_COLUMNS.index("gg")


class Slot(NamedTuple):
    """One layer of a parameter."""

    param: Tensor
    layers: Layers
    number: int
    hyper: Hyper
    state: torch.dtype


class Place(NamedTuple):
    """Where the sums of a batch's tensors belong."""

    slots: Tensor | None  #: None if they are all slots in order
    weights: Tensor | None  #: 1 for each tensor whose sums count on this rank, else 0; None if all count


class Exchange:
    """The slots of the parameters that one set of ranks shares."""

    def __init__(self, p: Tensor, span: Span) -> None:
        self._group = process_group(p, span)
        self._device = torch.device(span.device_type)
        if span.device_type != "cpu":
            self._device = torch.device(span.device_type, torch.get_device_module(span.device_type).current_device())
        self._slots: list[Slot] = []
        self._work: Any = None

    def reserve(self, p: Tensor, layers: Layers, hyper: Hyper, state: torch.dtype) -> int:
        """Reserve slots for the layers of a parameter. Returns the first one."""
        self._slots += [Slot(p, layers, number, hyper, state) for number in range(layers.count)]
        return len(self._slots) - layers.count

    def close(self) -> None:
        """Call after the last reservation."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(NO_EAGER_STEP)  # the copies to the device below synchronize
        self._buffer = torch.zeros(len(self._slots) + 1, len(PRODUCT_COLUMNS), dtype=torch.float64, device=self._device)
        # rule.is_usable: without clipping the squares must fit into the second moment
        wide = torch.float64
        limits = [torch.finfo(slot.state if slot.hyper.clip_norm is None else wide).max for slot in self._slots]
        self._limits = torch.tensor(limits, dtype=wide, device=self._device)
        clips = [slot.hyper.clip_norm is not None for slot in self._slots]
        keeps = [slot.hyper.nonfinite != "skip" for slot in self._slots]
        self._clips, self._keeps = (torch.tensor(mask, device=self._device) for mask in (clips, keeps))
        self._any_clips = any(clips)
        #: Whether NaN or inf in a gradient raises.
        self.raises = any(slot.hyper.nonfinite == "raise" for slot in self._slots)
        self._places: dict[int, Place] = {}  # by the batch's id

    # -- one step --------------------------------------------------------------------------------

    def start(self, parts: list[tuple[Batch, Reduced]], found_inf: Tensor | None) -> None:
        """Send the sums of this rank's batches."""
        import torch.distributed as dist

        places = [self._place(batch) for batch, _ in parts]
        if not any(place.slots is None for place in places):
            self._buffer.zero_()  # slots without a gradient
        for (_, reduced), (slots, weights) in zip(parts, places, strict=True):
            # replicas send 0 times their sums: 0 * NaN is NaN, so a bad replica is seen by all
            if slots is None:
                self._buffer[:-1] = reduced.sums if weights is None else reduced.sums.to(self._device) * weights
            else:
                sums = reduced.sums.to(self._device)
                self._buffer.index_copy_(0, slots, sums if weights is None else sums * weights)
        found = self._buffer[-1, 0]
        # assigning a Python number to one element would synchronize with the device
        found.zero_() if found_inf is None else found.copy_(found_inf.reshape(()))
        self._work = dist.all_reduce(self._buffer, group=self._group, async_op=True)

    def finish(self, parts: list[tuple[Batch, Reduced]]) -> None:
        """Wait for the sums over all ranks and write them to the batches."""
        self._work.wait()
        self._work = None
        self.usable = self._buffer[:-1, GG] <= self._limits  # False for NaN
        for batch, reduced in parts:
            slots = self._place(batch).slots
            reduced.sums.copy_(self._buffer[:-1] if slots is None else self._buffer[slots])
            reduced.finite.copy_(self.usable if slots is None else self.usable[slots])

    @property
    def found_inf(self) -> Tensor:
        """Whether GradScaler found inf or NaN on one of the ranks: a number that is then not 0."""
        return self._buffer[-1, 0]

    def squared_norm(self, grad_scale: Tensor | None) -> Tensor | None:
        """Squared norm of the gradients whose group clips, over all ranks; None if no group clips."""
        if not self._any_clips:
            return None
        squared = self._buffer[:-1, GG]
        squared = torch.where(self._clips & (self.usable | self._keeps), squared, torch.zeros_like(squared)).sum()
        return squared if grad_scale is None else squared / grad_scale.to(squared).reshape(()).square()

    def nonfinite(self) -> list[Slot]:
        """The layers whose gradient must not hold NaN or inf and does. Synchronizes with the device."""
        if not self.raises:
            return []
        usable = zip(self._slots, self.usable.tolist(), strict=True)
        return [slot for slot, ok in usable if not ok and slot.hyper.nonfinite == "raise"]

    def _place(self, batch: Batch) -> Place:
        known = self._places.get(id(batch))
        if known is None:
            origins = batch.layer_origins()
            slots = [origin.slot + number for origin, number in origins]
            weights = [[float(origin.span is not None and origin.span.counts)] for origin, _ in origins]
            known = self._places[id(batch)] = Place(
                None if slots == list(range(len(self._slots))) else torch.tensor(slots, device=self._device),
                None if all(weight == [1.0] for weight in weights) else torch.tensor(weights, device=self._device),
            )
        return known


class NormGroup(NamedTuple):
    """``Aida.norm_group``, and the device on which its ranks communicate."""

    group: Any
    device: torch.device


def add_over_ranks(norm_group: NormGroup, numbers: Sequence[Tensor | float]) -> Tensor:
    """Each number added over the ranks of a process group, in float64 and in one all-reduce."""
    import torch.distributed as dist

    buffer = torch.zeros(len(numbers), dtype=torch.float64, device=norm_group.device)
    for i, number in enumerate(numbers):
        buffer[i].copy_(number.reshape(())) if isinstance(number, Tensor) else buffer[i].fill_(number)
    dist.all_reduce(buffer, group=norm_group.group)
    return buffer
