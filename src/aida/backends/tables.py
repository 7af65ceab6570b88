"""A batch as flat arrays that a kernel can walk: addresses per tensor, values per run.

Both fused paths, the C loop and the Triton kernels, read these arrays; the order of rows and
columns here is a contract with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from aida._step.hyper import Hyper
from aida.backends import Batch
from aida.backends.library import describer

_address = torch.Tensor.data_ptr
_generations = count()

#: Rows of the address table, one column per tensor.
ADDRESS_ROWS = ("param", "grad", "exp_avg", "exp_avg_var", "step", "skipped")


class TensorTable:
    """Where the tensors of a batch lie, row after row of :data:`ADDRESS_ROWS`, and what they are.

    A kernel reads bare addresses, so whatever a user may have done to a tensor since the last step (put
    other memory behind it, shortened it, changed its dtype) has to be noticed before the next.
    """

    def __init__(self, batch: Batch) -> None:
        #: Another number for other tensors: what a backend keeps about a batch is out of date when it changes.
        self.generation = next(_generations)
        params, grads, *state = batch.tensor_lists()
        self._params, self._state = params, list(chain(*state))
        self._gradient_row = slice(len(params), 2 * len(params))
        self._objects = array("Q", map(id, (*params, *grads, *self._state)))
        self.addresses = array("Q", bytes(len(self._objects) * 8))
        self._forms = self._read(grads)
        self._places = self._read_places()

    def look(self, grads: list[Tensor]) -> bool:
        """Read everything again, with these gradients.

        False if a tensor is not what it was, or one that is not a gradient not where it was.
        """
        self._objects[self._gradient_row] = array("Q", map(id, grads))
        forms = self._read(grads)
        return forms is not None and bool(forms == self._forms) and self._read_places() == self._places

    def place_gradients(self, grads: list[Tensor]) -> None:
        """Let the kernels read other gradients, such as copies in another memory order."""
        self.addresses[self._gradient_row] = array("Q", map(_address, grads))

    def _read_places(self) -> array[int]:
        return self.addresses[: self._gradient_row.start] + self.addresses[self._gradient_row.stop :]

    def _read(self, grads: list[Tensor]) -> Any:
        """Fill in the addresses; returns what the tensors are, None if one of them cannot be read."""
        describe = describer()
        try:
            if describe is not None:
                forms = array("Q", bytes(len(self._objects) * 8))
                return forms if describe(self._objects, self.addresses, forms) else None
            tensors = (*self._params, *grads, *self._state)
            self.addresses = array("Q", map(_address, tensors))
            if any(address == 0 and t.numel() for address, t in zip(self.addresses, tensors, strict=True)):
                return None  # its memory was freed
            return [(t.device, t.dtype, t.shape, t.stride()) for t in tensors]
        except RuntimeError:  # without memory: sparse, or on the meta device
            return None


def value_rows(hypers: Iterable[Hyper]) -> array[float]:
    """The value table (:data:`aida.backends.library.VALUE_COLUMNS`), row after row.

    A learning rate on a device is left 0: the kernel reads it there.
    """
    rows = array("d")
    for hyper in hypers:
        lr = hyper.lr
        rows.extend(
            (
                0.0 if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr),
                float(hyper.beta1),
                float(hyper.beta2),
                hyper.eps,
                hyper.l2,
                hyper.decay,
                hyper.xi,
                hyper.projections,
                hyper.clip_norm or 0.0,  # 0 means: this run does not clip
                hyper.sign,
                hyper.nonfinite == "skip",
            )
        )
    return rows


def lies_like(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same memory order."""
    if one.stride() == other.stride():
        return True
    # the stride of a dimension of size 1 means nothing: a 1x1 convolution is contiguous and channels-last at once
    return all(a == b for size, a, b in zip(one.shape, one.stride(), other.stride(), strict=True) if size > 1)


def same_layout(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The gradients as memory holds the parameters, element by element; a copy only where they differ."""
    return [
        g if lies_like(g, p) and not g.is_neg() else torch.empty_like(p, dtype=g.dtype).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]


def keep_state_layout(batch: Batch) -> None:
    """Lay the moments out as their parameters lie now: a model may turn channels-last after its first step."""
    for p, *moments in zip(batch.params, batch.exp_avgs, batch.exp_avg_vars, strict=True):
        for moment in moments:
            if not lies_like(moment, p):
                moment.data = torch.empty_like(p, dtype=moment.dtype).copy_(moment)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one stretch of memory, in any order of dimensions."""
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return True  # the common case, ten times as fast to ask
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def note_write(params: list[Tensor]) -> None:
    """Tell autograd that a kernel wrote: a graph that saved the old values must fail, as after any in-place update."""
    increment_version(params)
