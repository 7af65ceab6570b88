"""Sharded parameters (DTensor): what of a tensor this rank holds, and which ranks hold the rest.

The kernels see plain local tensors only. This module is the one place that knows DTensor; torch.distributed is not
imported before the first DTensor is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Process groups that were created for meshes of several dimensions, by the ranks and the default group.
_groups: dict[tuple[Any, tuple[int, ...]], Any] = {}


class Span(NamedTuple):
    """The ranks that share a parameter."""

    ranks: tuple[int, ...]
    device_type: str  #: of the mesh, on which the ranks communicate
    #: Whether this rank's sums count. Of several replicas of a shard only the first counts.
    counts: bool


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "_local_tensor")  # without importing torch.distributed, and torch.compile can trace it


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank, sharing its memory; any other tensor itself."""
    return _waited(tensor._local_tensor) if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(p: Tensor, grad: Tensor, redistributed: dict[int, Tensor]) -> Tensor:
    """The part of a gradient that belongs to this rank's part of the parameter.

    A gradient with other placements (Partial or Replicate) is redistributed, which communicates. So it happens once per
    step: ``redistributed`` has the results of this step by the parameter's id, and gets new ones.
    """
    if not is_dtensor(p):
        return _waited(grad)
    if not is_dtensor(grad):
        raise RuntimeError(
            f"the gradient of a DTensor parameter (shape {tuple(p.shape)}) is a {type(grad).__name__}; "
            "assign a DTensor, for example with distribute_tensor"
        )
    if not _fits(p, grad):
        if id(p) not in redistributed:  # two parameters may share a gradient
            redistributed[id(p)] = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
        grad = redistributed[id(p)]
    return _waited(grad._local_tensor)  # type: ignore[attr-defined]


class GradientReader:
    """Reads the local gradients of the same parameters at every step."""

    def __init__(self, params: list[Tensor]) -> None:
        self._params = params
        #: Specs of gradients that were found to fit, by identity; None for a plain parameter.
        self._fitting = list(map(_spec, params))

    def local(self, grads: list[Tensor], redistributed: dict[int, Tensor]) -> list[Tensor]:
        """:func:`local_gradient` of each parameter. FSDP2's gradients have the same spec object at every step."""
        specs = list(map(_spec, grads))
        if not all(map(is_, specs, self._fitting)):
            for i, (p, grad, spec) in enumerate(zip(self._params, grads, specs, strict=True)):
                if spec is not self._fitting[i]:
                    if not (is_dtensor(p) and is_dtensor(grad) and _fits(p, grad)):
                        pairs = zip(self._params, grads, strict=True)
                        return [local_gradient(p, grad, redistributed) for p, grad in pairs]
                    self._fitting[i] = spec
        found = [grad if spec is None else grad._local_tensor for grad, spec in zip(grads, specs, strict=True)]  # type: ignore[attr-defined]
        return found if set(map(type, found)) <= {Tensor} else list(map(_waited, found))


def _spec(tensor: Tensor) -> Any:
    return getattr(tensor, "_spec", None)


def _fits(p: Tensor, grad: Tensor) -> bool:
    one, other = p._spec, grad._spec  # type: ignore[attr-defined]
    return one is other or bool(one.mesh == other.mesh and one.placements == other.placements)


def _waited(tensor: Tensor) -> Tensor:
    """The values of an AsyncCollectiveTensor, whose collective may still be running; any other tensor itself."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def span_of(p: Tensor) -> Span | None:
    """The ranks that share a parameter; None if this rank has all of it to itself."""
    if not is_dtensor(p) or p.device_mesh.size() == 1:  # type: ignore[attr-defined]
        return None
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    first = all(at == 0 for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())
    return Span(tuple(sorted(mesh.mesh.flatten().tolist())), mesh.device_type, first)


def process_group(p: Tensor, span: Span) -> Any:
    """The process group of exactly the ranks of a span. All of them must call this together the first time."""
    import torch.distributed as dist

    mesh = p.device_mesh  # type: ignore[attr-defined]
    wide = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if len(wide) == 1:
        return mesh.get_group(wide[0])
    world = dist.group.WORLD
    if len(span.ranks) == dist.get_world_size():
        return world
    key = world, span.ranks
    if key not in _groups:
        _groups[key] = dist.new_group(list(span.ranks), use_local_synchronization=True)
    return _groups[key]


def global_indices(p: Tensor, dim: int) -> list[int]:
    """The indices along one dimension that this rank holds, in ascending order."""
    if not is_dtensor(p):
        return list(range(p.shape[dim]))
    mesh = p.device_mesh  # type: ignore[attr-defined]
    indices = torch.arange(p.shape[dim], device="cpu").view(*[1] * dim, -1)
    for at, size, placement in zip(mesh.get_coordinate(), mesh.shape, p.placements, strict=True):  # type: ignore[attr-defined]
        if getattr(placement, "dim", None) == dim:
            shards, _ = placement._split_tensor(indices, size, with_padding=False, contiguous=True)
            indices = shards[at]
    found: list[int] = indices.flatten().tolist()
    return found


def counter_like(p: Tensor, shape: Sequence[int], local_shape: Sequence[int], dims: int) -> Tensor:
    """Zeros with one number per layer of a parameter: a DTensor if its ranks hold different layers.

    The first ``dims`` dimensions of the counter are those of the parameter, and are placed alike.
    """
    zeros = torch.zeros(tuple(local_shape), dtype=torch.float32, device=p.device)
    if not is_dtensor(p):
        return zeros
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    cuts = [getattr(placement, "dim", dims) < dims for placement in placements]
    # by placement, not by shape: one rank may hold the only layer, and all ranks need the same type
    if not any(cut and size > 1 for cut, size in zip(cuts, mesh.shape, strict=True)):
        return zeros
    from torch.distributed.tensor import DTensor, Replicate

    alike = [placement if cut else Replicate() for placement, cut in zip(placements, cuts, strict=True)]
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(zeros, mesh, alike, run_check=False, shape=size, stride=stride)


def copy_part_(target: Tensor, value: Tensor) -> None:
    """Copy a tensor of a checkpoint, whole or placed in any way, into a tensor of the same shape.

    Communicates only if ``value`` is a DTensor with other placements than ``target``.
    """
    if not is_dtensor(target):
        target.copy_(value.full_tensor() if is_dtensor(value) else value)  # type: ignore[attr-defined]
        return
    if is_dtensor(value) and value.device_mesh == target.device_mesh:  # type: ignore[attr-defined]
        value = value.redistribute(target.device_mesh, target.placements)._local_tensor  # type: ignore[attr-defined]
    else:  # every rank has the whole tensor and keeps its part
        value = value.full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined]
        for dim in {placement.dim for placement in target.placements if hasattr(placement, "dim")}:  # type: ignore[attr-defined]
            mine = torch.tensor(global_indices(target, dim), dtype=torch.int64, device=value.device)  # may be empty
            value = value.index_select(dim, mine)
    local(target).copy_(_waited(value))
