"""A batch as flat arrays that a kernel can walk: addresses per tensor, values per run.

Both fused paths, the C loop and the Triton kernels, read these arrays; the order of rows and
columns here is a contract with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from aida.backends import Batch
from aida.hyper import Hyper

#: Rows of the address table, one column a tensor.
ADDRESS_ROWS = ("param", "grad", "exp_avg", "exp_avg_var", "step", "skipped")

#: Columns of the value table, one row a run of the batch.
VALUE_COLUMNS = (
    "lr", "beta1", "beta2", "eps", "l2", "decay", "xi", "projections", "clip_norm", "sign", "skip",
)  # fmt: skip


_address = torch.Tensor.data_ptr


class AddressBook:
    """Where a batch's tensors lie, row after row.

    Asking a tensor for its address is what a step on the host spends most of its time on. A batch
    whose list of parameters is the very list of the last step was handed out by a roster, which saw
    that parameters and counters are where they were; gradients and moments are asked every time.
    """

    def __init__(self) -> None:
        self._params: list[Tensor] | None = None
        self._head: list[int] = []
        self._tail: list[int] = []

    def look(self, batch: Batch) -> list[int]:
        """The addresses that can change while the others stay: gradients and the two moments."""
        if batch.params is not self._params:
            self._params = batch.params
            self._head = list(map(_address, batch.params))
            self._tail = [*map(_address, batch.steps), *map(_address, batch.skipped)]
        return [*map(_address, batch.grads), *map(_address, batch.exp_avgs), *map(_address, batch.exp_avg_vars)]

    def rows(self, moving: list[int]) -> list[int]:
        """The whole table of :data:`ADDRESS_ROWS`, with what :meth:`look` found."""
        return [*self._head, *moving, *self._tail]


def value_rows(hypers: Iterable[Hyper]) -> array[float]:
    """The value table, row after row. A learning rate on a device is left 0: the kernel reads it there."""
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
