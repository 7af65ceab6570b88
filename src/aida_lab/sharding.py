"""One run under FSDP2: every process holds a part of each parameter, gradient and optimizer state.

Each process trains on its rows of every batch. A task scales its loss so that the mean of the gradients over processes
is the gradient of the whole batch, as under DDP. Checkpoints hold whole tensors, as those of one process do, so any
number of processes can resume the run. All processes draw the same random numbers, so there is one random state.

FSDP2 and DTensor are imported where they are used: that takes a second, and most runs are not sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from aida_lab import distributed


def shard(module: nn.Module, device: torch.device) -> None:
    """Shard a module over all processes, in place; it must be called as ``module(...)``.

    Each element of a ModuleList, such as a layer of a transformer, is gathered on its own while it computes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.world(),))
    blocks = [block for each in module.modules() if isinstance(each, nn.ModuleList) for block in each]
    for each in (*reversed(blocks), module):
        fully_shard(each, mesh=mesh)


def my_rows(batch: Tensor, dim: int = 0) -> Tensor:
    """This process's share of the rows of a batch; all of them in one process."""
    return batch[(slice(None),) * dim + (slice(distributed.rank(), None, distributed.world()),)]


def whole_dropout(rows: int) -> AbstractContextManager[Any]:
    """Draw dropout masks as one process does for a batch of ``rows``, of which this process has :func:`my_rows`.

    Every process draws the whole mask. So the masks do not depend on the number of processes, and neither does the
    state of the generators. Only :func:`torch.nn.functional.dropout` is changed, not the dropout inside of torch's
    attention. In compiled code FSDP2 splits the graph, so its masks may differ from those of one process.
    """
    return _WholeDropout(rows) if distributed.world() > 1 else nullcontext()


class _WholeDropout(TorchFunctionMode):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._dropout if func is functional.dropout else func)(*args, **(kwargs or {}))

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        mask = torch.dropout(x.new_ones(self._rows, *x.shape[1:]), p, training)
        return x * my_rows(mask).clone()  # a copy, because the backward pass would keep the whole mask


def gathered(state: Any) -> Any:
    """The state with whole tensors instead of shards: on the CPU of rank 0; None on the others. All ranks call it."""
    from torch.distributed.tensor import DTensor

    def whole(shards: DTensor) -> Tensor | None:
        full = shards.full_tensor()  # one tensor at a time, so that no device holds all
        return full.cpu() if distributed.is_main() else None

    return tree_map_only(DTensor, whole, state)


def outline(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Rank 0's checkpoint on every rank; elsewhere tensors of modules and optimizers have no values yet."""

    def shape(tensor: Tensor) -> Tensor:
        return tensor.to("meta") if tensor.ndim else tensor

    large = {} if state is None else {name: tree_map_only(Tensor, shape, state[name]) for name in _LARGE}
    others = distributed.broadcast(None if state is None else {**state, **large})
    return state if distributed.is_main() else others


_LARGE = ("modules", "optimizers")


def placed_module(state: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """A state of whole tensors, which rank 0 has, sharded as the module is."""
    own = module.state_dict()
    return {name: _placed(value, own[name]) for name, value in state.items()}


def placed_optimizer(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The same for the optimizer of a sharded module."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    placed = {
        number: {key: _placed(value, params[number]) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": placed}


def _placed(value: Any, like: Tensor) -> Any:
    """Rank 0's tensor on every rank, sharded as ``like`` is if it has the same shape."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(value, Tensor) or not value.ndim:
        return value  # came with the outline
    value = torch.empty_like(value, device=like.device) if value.is_meta else value.to(like.device)
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value, like.device_mesh, like.placements)
    dist.broadcast(value, src=0)
    return value
