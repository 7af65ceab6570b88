"""A batch as flat arrays for the fused kernels: pointers per tensor, hyper-parameters per run.

``columns.py`` lists the rows and columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from aida._step.hyper import Hyper
from aida.backends import Batch
from aida.backends.library import describer
from aida.rounding import decoded, encode_

_address = torch.Tensor.data_ptr

#: The first rows of the pointer table: tensors with the parameter's shape, which kernels access 16 bytes at a time.
SHAPED_ROWS = 4


class PointerTable:
    """The addresses of a batch's tensors, with their dtypes, shapes and strides.

    The rows are ``POINTER_ROWS``, then those of :class:`Batch` that its storage adds.

    Kernels read raw addresses. So a change that a user made to a tensor since the last step (other memory,
    another size or dtype) must be detected before the next step. Layers of one parameter are at fixed distances, so
    only the parameters are read.
    """

    def __init__(self, batch: Batch) -> None:
        whole = batch if batch.wholes is None else batch.wholes
        params, grads, *state = whole.tensor_lists()
        self._params, self._state = params, list(chain(*state))
        self._gradient_row = slice(len(params), 2 * len(params))
        self._objects = array("Q", map(id, (*params, *grads, *self._state)))
        self._wholes = array("Q", bytes(len(self._objects) * 8))
        self._distances = None if batch.wholes is None else _distances(batch)
        self.addresses = array("Q", bytes(len(batch) * len(batch.tensor_lists()) * 8))
        self._forms = self._read(grads)
        self._places = self._read_places()
        self._locate_layers()

    def look(self, grads: list[Tensor]) -> bool:
        """Read all tensors again, with these gradients.

        Returns False if a tensor's dtype, shape, strides or device changed, or the address of one that is not a
        gradient.
        """
        self._objects[self._gradient_row] = array("Q", map(id, grads))
        forms = self._read(grads)
        if forms is None or forms != self._forms or self._read_places() != self._places:
            return False
        self._locate_layers()
        return True

    def place_gradients(self, grads: list[Tensor]) -> None:
        """Replace the gradients' addresses, for example by those of copies in another memory order."""
        self._wholes[self._gradient_row] = array("Q", map(_address, grads))
        self._locate_layers()

    def _locate_layers(self) -> None:
        if self._distances is None:
            self.addresses = self._wholes
            return
        positions, distances = self._distances
        wholes, layers = (torch.frombuffer(table, dtype=torch.int64) for table in (self._wholes, self.addresses))
        torch.add(wholes[positions], distances, out=layers)

    def _read_places(self) -> array[int]:
        return self._wholes[: self._gradient_row.start] + self._wholes[self._gradient_row.stop :]

    def _read(self, grads: list[Tensor]) -> Any:
        """Fill in the addresses. Returns a description of the tensors, or None if one has no memory."""
        describe = describer()
        try:
            if describe is not None:
                forms = array("Q", bytes(len(self._objects) * 8))
                return forms if describe(self._objects, self._wholes, forms) else None
            tensors = (*self._params, *grads, *self._state)
            self._wholes = array("Q", map(_address, tensors))
            if any(address == 0 and t.numel() for address, t in zip(self._wholes, tensors, strict=True)):
                return None  # memory was freed
            return [(t.device, t.dtype, t.shape, t.stride()) for t in tensors]
        except RuntimeError:  # no memory: sparse, or on the meta device
            return None


def _distances(batch: Batch) -> tuple[Tensor, Tensor]:
    """For each row and layer, the position of the parameter's entry in the table and the distance from it in bytes."""
    assert batch.wholes is not None
    owner = [i for i, origin in enumerate(batch.origins) for _ in origin.layers.numbers]
    positions, distances = [], []
    for row, wholes in enumerate(batch.wholes.tensor_lists()):
        # all tensors with the parameter's shape have its memory order when kernels read them
        like = 0 if row < SHAPED_ROWS else row
        starts = [whole.storage_offset() for whole in batch.wholes.tensor_lists()[like]]
        for i, layer in zip(owner, batch.tensor_lists()[like], strict=True):
            positions.append(row * len(wholes) + i)
            distances.append((layer.storage_offset() - starts[i]) * wholes[i].element_size())
    return torch.tensor(positions, device="cpu"), torch.tensor(distances, device="cpu")


def value_rows(hypers: Iterable[Hyper]) -> array[float]:
    """The value table, one row of ``VALUE_COLUMNS`` per run. An lr on a device is 0 here: the kernel reads it there."""
    rows = array("d")
    for hyper in hypers:
        lr = 0.0 if isinstance(hyper.lr, Tensor) and hyper.lr.device.type != "cpu" else float(hyper.lr)
        clip_norm = hyper.clip_norm or 0.0  # 0: no clipping
        rows.extend((
            lr, float(hyper.beta1), float(hyper.beta2), hyper.eps, hyper.l2, hyper.decay, hyper.xi, hyper.projections,
            clip_norm, hyper.sign, hyper.nonfinite == "skip",
        ))  # fmt: skip
    return rows


def same_memory_order(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same memory order."""
    if one.stride() == other.stride():
        return True
    # ignore the stride of a dimension of size 1: a 1x1 convolution is both contiguous and channels-last
    return all(a == b for size, a, b in zip(one.shape, one.stride(), other.stride(), strict=True) if size > 1)


def match_memory_order(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The gradients in the memory order of the parameters; copied only if their order differs."""
    return [
        g if same_memory_order(g, p) and not g.is_neg() else torch.empty_like(p, dtype=g.dtype).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]


def match_state_order(batch: Batch) -> None:
    """Give the moments their parameters' memory format, which may change after the first step (channels-last)."""
    moments = zip(batch.exp_avgs, batch.exp_avg_scales, strict=True)
    roots = zip(batch.exp_avg_vars, batch.exp_avg_var_scales, strict=True)
    for p, *pairs, compensation in zip(batch.params, moments, roots, batch.compensations, strict=True):
        for tensor, scales in (*pairs, (compensation, None)):
            if scales is not None and not scales.is_contiguous():
                scales.data = scales.contiguous()
            if tensor is None or same_memory_order(tensor, p):
                continue
            if scales is None:
                tensor.data = torch.empty_like(p, dtype=tensor.dtype).copy_(tensor)
            else:  # other elements now share a block
                values = torch.empty_like(p, dtype=torch.float32).copy_(decoded(tensor, scales))
                tensor.data = torch.empty_like(p, dtype=tensor.dtype)
                encode_(tensor, scales, values)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is non-overlapping and dense, in any order of its dimensions."""
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return True  # the common case; this test is ten times as fast
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def note_write(params: list[Tensor]) -> None:
    """Bump version counters, so that autograd refuses values saved before a kernel wrote to these tensors."""
    increment_version(params)
