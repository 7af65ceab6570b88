"""How a parameter and its state are stored: the precision of the state, and how the parameter is rounded.

Also where the random bits of a parameter start, so that each element has the same ones on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from aida._step.layers import Layers
from aida._step.sharding import global_indices, is_dtensor, local
from aida.rounding import BLOCK

Precision = Literal["float32", "bfloat16", "fp8"]
Rounding = Literal["nearest", "stochastic", "kahan"]

#: Keys of a parameter group, with their defaults.
STORAGE_DEFAULTS: dict[str, Any] = {
    "state_precision": "float32", "stochastic_rounding": False, "kahan_sum": False, "rounding_seed": 0
}  # fmt: skip
STORAGE_KEYS = tuple(STORAGE_DEFAULTS)

#: Keys that stay as they are when a checkpoint is loaded: they are about memory, not about training.
OWN_KEYS = ("state_precision", "stochastic_rounding", "kahan_sum")

#: How parameters are rounded, in words.
ROUNDINGS: dict[Rounding, str] = {
    "nearest": "rounded to nearest", "stochastic": "stochastically rounded", "kahan": "Kahan-summed"
}  # fmt: skip

#: Parameters with fewer elements keep float32 state: they are a small part of a model, and often biases or norms.
SMALL = 4096


class Storage(NamedTuple):
    """The form of one parameter and its state. All tensors of a batch have the same."""

    state: Precision = "float32"
    rounding: Rounding = "nearest"  #: of the parameter


#: float32 state (float64 for float64 parameters), and parameters rounded to nearest.
FULL = Storage()


class Stream(NamedTuple):
    """Where the random bits of a tensor are: element i has position ``first + i // run * stride + i % run``."""

    seed: int
    first: int
    run: int  #: elements of this rank that are adjacent in the whole parameter
    stride: int

    def positions(self, count: int, device: torch.device) -> Tensor:
        """The positions of the first ``count`` elements."""
        i = torch.arange(count, device=device)
        return self.position(i) if count > self.run else self.first + i

    def position(self, i: Any) -> Any:
        """The position of an element, or of each element of a tensor of numbers."""
        return self.first + i // self.run * self.stride + i % self.run


#: Of parameters that are stored in full: nothing of them is rounded stochastically.
NO_STREAM = Stream(0, 0, 1, 0)


def storage_of(p: Tensor, group: Mapping[str, Any], layers: Layers) -> Storage:
    """How a parameter of this group is stored."""
    if group["state_precision"] == "float32" and not (group["stochastic_rounding"] or group["kahan_sum"]):
        return FULL
    low = p.dtype in (torch.bfloat16, torch.float16)
    if not low and p.dtype != torch.float32:
        return FULL
    rounding: Rounding = "nearest"
    if low and (group["stochastic_rounding"] or group["kahan_sum"]):
        rounding = "stochastic" if group["stochastic_rounding"] else "kahan"
    state = group["state_precision"]
    if state == "fp8" and (p.numel() < SMALL or not fits_blocks(p, layers)):
        state = "float32"
    return Storage(state, rounding) if state != "float32" or rounding != "nearest" else FULL


def check_storage_keys(group: Mapping[str, Any]) -> None:
    """Refuse invalid values of the storage keys."""
    state = group["state_precision"]
    if state not in get_args(Precision):
        raise ValueError(f"state_precision={state!r} must be one of {', '.join(map(repr, get_args(Precision)))}")
    for key in ("stochastic_rounding", "kahan_sum"):
        if not isinstance(group[key], bool):
            raise ValueError(f"{key}={group[key]!r} must be True or False")
    if group["stochastic_rounding"] and group["kahan_sum"]:
        raise ValueError(
            "stochastic_rounding and kahan_sum cannot both be True: each keeps updates that rounding would lose; "
            "set one of them to False"
        )
    seed = group["rounding_seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise ValueError(f"rounding_seed={seed!r} must be an integer from 0 to 2**32 - 1")
    if group["differentiable"] and (state != "float32" or group["stochastic_rounding"] or group["kahan_sum"]):
        raise RuntimeError("differentiable=True needs float32 state and no stochastic_rounding or kahan_sum")


def fits_blocks(p: Tensor, layers: Layers) -> bool:
    """Whether 8-bit blocks end where this parameter's layers and shards end. If not, its state stays float32."""
    if layers.shape:
        if not p.is_contiguous() or (layers.splits is not None and layers.split_dim != layers.dims):
            return False
        if any(prod(layers.shape_of(p, number)) % BLOCK for number in range(layers.count)):
            return False
    if not is_dtensor(p):
        return True
    dims, counts = _row_dims(p.shape), [1] * (p.ndim + 1)
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):  # type: ignore[attr-defined]
        if hasattr(placement, "dim"):
            counts[placement.dim] *= size
    inner = prod(p.shape[dims + 1 :])
    evenly = p.shape[dims] % counts[dims] == 0 and p.shape[dims] // counts[dims] * inner % BLOCK == 0
    return (counts[dims] == 1 or evenly) and all(count == 1 for count in counts[dims + 1 :])


def local_block_shape(p: Tensor) -> torch.Size:
    """The shape of the scales on this rank."""
    dims, mine = _row_dims(p.shape), local(p).shape
    return torch.Size((*mine[:dims], -(-prod(mine[dims:]) // BLOCK)))


def _row_dims(shape: torch.Size) -> int:
    """The largest number of leading dimensions that leave whole blocks; 0 if there is none."""
    return next((dims for dims in reversed(range(len(shape))) if prod(shape[dims:]) % BLOCK == 0), 0)


def scales_like(p: Tensor) -> Tensor:
    """Zeros with one uint8 per block of a parameter, placed as the parameter.

    The shape is that of the leading dimensions, then the number of blocks in the others together.
    """
    zeros = torch.zeros(local_block_shape(p), dtype=torch.uint8, device=local(p).device)
    if not is_dtensor(p):
        return zeros
    from torch.distributed.tensor import DTensor

    dims = _row_dims(p.shape)
    size = torch.Size((*p.shape[:dims], -(-prod(p.shape[dims:]) // BLOCK)))
    stride = torch.empty(size, device="meta").stride()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return DTensor.from_local(zeros, mesh, placements, run_check=False, shape=size, stride=stride)


def stream_of(p: Tensor, number: int, seed: int) -> Stream:
    """The random bits of a parameter's part on this rank. ``number`` is its place in the optimizer.

    If a dimension between two sharded ones is sharded too, the bits depend on the sharding.
    """
    first, count = number << 40, local(p).numel()
    if not is_dtensor(p) or not count:
        return Stream(seed, first, max(count, 1), 0)
    indices = [global_indices(p, dim) for dim in range(p.ndim)]
    partial = [dim for dim, mine in enumerate(indices) if len(mine) < p.shape[dim]]
    last = max(partial, default=0)  # dimensions after this one are whole
    inner = prod(p.shape[last + 1 :])
    run, stride = len(indices[last]) * inner, p.shape[last] * inner
    start = 0
    for dim, mine in enumerate(indices):
        start = start * p.shape[dim] + mine[0]
    return Stream(seed, first + start, run, stride)


def places(layers: Iterable[Tensor], whole: Tensor) -> list[tuple[Any, int]]:
    """Start and size of each layer, a view of ``whole``, in elements from its start."""
    return [(layer.storage_offset() - whole.storage_offset(), layer.numel()) for layer in layers]


def layer_stream(stream: Stream, offset: int, count: int, whole: int) -> Stream:
    """The random bits of a layer that starts at element ``offset`` of its parameter's ``whole`` elements."""
    if stream.run >= whole:
        return stream._replace(first=stream.first + offset, run=max(count, 1))
    return stream._replace(first=stream.first + offset // stream.run * stream.stride)
