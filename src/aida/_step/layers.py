"""The layers of a parameter: which of its elements are projected together, and which of them this rank holds.

A parameter is one layer unless its group says otherwise. ``layer_dims=n`` makes every index of the first n dimensions
a layer: the experts of a stack (experts, d, h), or the heads of a tensor (heads, d, h). ``split_sizes`` cuts one
dimension into layers: the queries, keys and values of a fused projection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any

from torch import Tensor

from aida._step.sharding import global_indices

#: Keys of a parameter group, and their values for parameters that are one layer each.
ONE_LAYER_KEYS: dict[str, Any] = {"layer_dims": 0, "split_sizes": None, "split_dim": None}
LAYER_KEYS = tuple(ONE_LAYER_KEYS)


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of one parameter."""

    shape: tuple[int, ...] = ()  #: of ``step`` and ``skipped``, with one number per layer; () if there is one layer
    local_shape: tuple[int, ...] = ()  #: of the part of ``step`` and ``skipped`` on this rank
    numbers: tuple[int, ...] = (0,)  #: of the layers on this rank, counted in the whole parameter
    dims: int = 0  #: leading dimensions that count layers
    split_dim: int = 0
    #: Start and length of each split, in elements of this rank along ``split_dim``; None without splits.
    splits: tuple[tuple[int, int], ...] | None = None
    split_sizes: tuple[int, ...] = ()  #: on all ranks

    @property
    def count(self) -> int:
        """Layers of the whole parameter, on all ranks."""
        return prod(self.shape)

    def shape_of(self, p: Tensor, number: int) -> tuple[int, ...]:
        """The shape of one layer of a parameter, on all ranks."""
        shape = list(p.shape)
        if self.splits is not None:
            shape[self.split_dim] = self.split_sizes[number % len(self.split_sizes)]
        return tuple(shape[self.dims :])

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Each layer's part of a local tensor with the parameter's shape, in the order of ``numbers``."""
        parts = [tensor]
        for _ in range(self.dims):
            parts = [part for tensor in parts for part in tensor.unbind(0)]
        if self.splits is None:
            return parts
        dim = self.split_dim - self.dims
        return [part.narrow(dim, start, length) for part in parts for start, length in self.splits]

    def counters(self, counter: Tensor) -> list[Tensor]:
        """Each layer's number of a local counter, as 0-dim views."""
        return [counter] if not self.shape else list(counter.view(-1).unbind(0))


ONE_LAYER = Layers()


def layers_of(p: Tensor, group: Mapping[str, Any]) -> Layers:
    """The layers of a parameter. Raises ValueError if the keys of its group do not fit its shape."""
    dims, sizes = group["layer_dims"], group["split_sizes"]
    if not dims and sizes is None:
        return ONE_LAYER
    if dims > p.ndim:
        raise ValueError(f"layer_dims={dims}, but a parameter has shape {tuple(p.shape)}; give it a group of its own")
    leading = [global_indices(p, dim) for dim in range(dims)]
    shape, local_shape = tuple(p.shape[:dims]), tuple(map(len, leading))
    numbers = [_number(index, shape) for index in product(*leading)]
    if sizes is None:
        return Layers(shape, local_shape, tuple(numbers), dims)
    split_dim = _split_dim(p, group)
    splits = _splits(global_indices(p, split_dim), sizes)
    numbers = [number * len(sizes) + split for number in numbers for split in range(len(sizes))]
    shape, local_shape = (*shape, len(sizes)), (*local_shape, len(sizes))
    return Layers(shape, local_shape, tuple(numbers), dims, split_dim, splits, tuple(sizes))


def layer_label(label: str, layers: Layers, number: int) -> str:
    """The name of one layer of a parameter: that of the parameter, with an index if it has several layers."""
    index: list[int] = []
    for size in reversed(layers.shape):
        number, at = divmod(number, size)
        index.insert(0, at)
    return f"{label}{index}" if index else label


def check_layer_keys(group: Mapping[str, Any]) -> None:
    """Refuse invalid values of the layer keys, whatever the parameters."""
    dims, sizes, split_dim = (group[key] for key in LAYER_KEYS)
    if not _is_count(dims, 0):
        raise ValueError(
            f"layer_dims={dims!r} must be an integer >= 0: the number of leading dimensions that count layers"
        )
    if sizes is not None and not (isinstance(sizes, (tuple, list)) and sizes and all(_is_count(s, 1) for s in sizes)):
        raise ValueError(
            f"split_sizes={sizes!r} must be a tuple of positive integers, such as (512, 512, 512), or None"
        )
    if split_dim is not None and (sizes is None or isinstance(split_dim, bool) or not isinstance(split_dim, int)):
        raise ValueError(f"split_dim={split_dim!r} must be an integer, together with split_sizes, or None")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _split_dim(p: Tensor, group: Mapping[str, Any]) -> int:
    """The dimension that ``split_sizes`` cuts, checked against the parameter."""
    dims, sizes, given = (group[key] for key in LAYER_KEYS)
    dim = dims if given is None else given + p.ndim if given < 0 else given
    if not dims <= dim < p.ndim or sum(sizes) != p.shape[dim]:
        raise ValueError(
            f"split_sizes={tuple(sizes)}, split_dim={given} and layer_dims={dims} do not fit a parameter of shape "
            f"{tuple(p.shape)}: the sizes must add up to the size of a dimension after those of layer_dims"
        )
    return int(dim)


def _splits(indices: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Start and length of each split among the indices of this rank, which ascend."""
    starts = [bisect_left(indices, end) for end in accumulate(sizes, initial=0)]
    return tuple((start, stop - start) for start, stop in pairwise(starts))


def _number(index: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for i, size in zip(index, shape, strict=True):
        number = number * size + i
    return number
