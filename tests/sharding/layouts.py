"""Ways to lay a whole tensor out over ranks, and how to compare the shards of a rank with a whole tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Layout:
    """A mesh over all ranks, some of its dimensions, and a placement on each of these."""

    name: str
    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    dims: tuple[str, ...] = ()  #: all of them if empty

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    @property
    def mesh(self) -> DeviceMesh:
        return submesh(self.sizes, self.dims)

    @property
    def is_last_replica(self) -> bool:
        """Whether this rank holds the last replica of its shard."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        at = zip(coordinate, self.mesh.shape, self.placements, strict=True)
        return all(i == size - 1 for i, size, placement in at if placement.is_replicate())

    def fits(self, shape: tuple[int, ...]) -> bool:
        return all(getattr(placement, "dim", -1) < len(shape) for placement in self.placements)

    def lay(self, whole: Tensor) -> DTensor:
        """This rank's part, as a DTensor, without communication."""
        return distribute_tensor(whole.clone(), self.mesh, self.placements, src_data_rank=None)

    def lay_as(self, kind: str, whole: Tensor) -> DTensor:
        """A gradient with the values of ``whole`` that is laid out in another way than its parameter."""
        mesh = self.mesh
        if kind == "fitting":
            return self.lay(whole)
        everywhere = DTensor.from_local(whole.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        if kind == "replicate":
            return everywhere
        # only one rank has values, so that the sum over ranks is exact
        mine = whole.clone() if not any(mesh.get_coordinate() or ()) else torch.zeros_like(whole)
        partial = DTensor.from_local(mine, mesh, [Partial()] * mesh.ndim, run_check=False)
        return partial if kind == "partial" else partial.redistribute(mesh, self.placements, async_op=True)


@lru_cache
def submesh(sizes: tuple[int, ...], dims: tuple[str, ...]) -> DeviceMesh:
    if not dims:
        return init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[: len(sizes)])
    return submesh(sizes, ())[dims]


def _layouts() -> tuple[Layout, ...]:
    row, column, whole = Shard(0), Shard(1), Replicate()
    two, four, eight, square, cube = (2,), (4,), (8,), (2, 2), (2, 2, 2)
    return (
        Layout("rows over 2", two, (row,)),
        Layout("columns over 2", two, (column,)),
        Layout("2 replicas", two, (whole,)),
        Layout("rows over 4", four, (row,)),
        Layout("columns over 4", four, (column,)),
        Layout("HSDP 2x2", square, (whole, row)),
        Layout("HSDP 2x2 with columns", square, (whole, column)),
        Layout("shards, then replicas 2x2", square, (row, whole)),
        Layout("4 replicas 2x2", square, (whole, whole)),
        Layout("rows x columns 2x2", square, (row, column)),
        Layout("rows x rows 2x2", square, (row, row)),
        Layout("FSDP2 on TP rows 2x2", square, (_StridedShard(0, split_factor=2), row)),
        Layout("first dimension of 2x2", square, (row,), ("a",)),
        Layout("last dimension of 2x2", square, (column,), ("b",)),
        Layout("rows over 8", eight, (row,)),
        Layout("HSDP 2x2x2", cube, (whole, row, whole)),
        Layout("HSDP x TP columns 2x2x2", cube, (whole, row, column)),
        Layout("HSDP x TP rows 2x2x2", cube, (whole, _StridedShard(0, split_factor=2), row)),
        Layout("two dimensions of 2x2x2", cube, (row, column), ("a", "c")),
        Layout("replicas and shards on two dimensions of 2x2x2", cube, (whole, row), ("b", "c")),
    )


LAYOUTS = _layouts()


def gap(one: Tensor, other: Tensor) -> float:
    """0 if two tensors are the same bit for bit; else the largest difference, relative to the largest element.

    NaN is the same as NaN, and infinitely far from a number.
    """
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (one.detach(), other.detach()))
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.numel() == 0:
        return 0.0
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = one.contiguous().view(bits) == other.contiguous().view(bits)
    same |= one.isnan() & other.isnan()
    if bool(same.all()):
        return 0.0
    if bool((one.isfinite() != other.isfinite()).any()):
        return float("inf")
    scale = other[other.isfinite()].double().abs().max()
    return float((one[~same].double() - other[~same].double()).abs().max() / scale.clamp(min=1e-300))


def shard_gap(layout: Layout | None, mine: Any, whole: Tensor) -> float:
    """:func:`gap` between a tensor and this rank's part of a whole one."""
    if layout is None or not isinstance(mine, DTensor):
        return gap(mine, whole)
    return gap(mine.to_local(), layout.lay(whole).to_local())
