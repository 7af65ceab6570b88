"""Detects and refuses situations in which an update would be silently wrong.

Aida needs whole layers and, with ``clip_norm``, the whole model. Some libraries cut layers into pieces, or build
one optimizer per part of a model, and the user may not know.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from aida._step.group_rules import is_uninitialized
from aida._step.sharding import is_dtensor

#: Modules that build one optimizer per part of a model, with a name for error messages.
PART_BUILDERS = {
    "torch.distributed.optim.zero_redundancy_optimizer": "ZeroRedundancyOptimizer",
    "torch.distributed.optim.apply_optimizer_in_backward": "an optimizer that runs in the backward pass",
    "torchao.optim.cpu_offload": "torchao's CPUOffloadOptimizer",
}

#: Modules of the frames around a function that torch.compile leaves alone, as it does Aida's constructor.
UNTRACED_BY = ("torch._compile", "torch._dynamo.eval_frame")

#: Functions that call ``step`` only to create the state, with the names of their modules.
STATE_INITIALIZERS = (
    ("_init_optim_state", "torch.distributed.checkpoint.state_dict"),
    ("init_optim_state", "torchtitan.components.optimizer.utils"),
)

USE_CLIP_GRAD_NORM = "leave clip_norm=None and call torch.nn.utils.clip_grad_norm_ before the step"


def check_whole(p: Tensor, owner: str, *, sharded: bool = False) -> None:
    """Refuse a tensor that holds a part of a layer, or several layers. ``sharded`` allows DTensors."""
    if is_uninitialized(p):
        return
    if is_dtensor(p):
        placements = p.placements  # type: ignore[attr-defined]
        if not sharded:
            raise TypeError(
                f"{owner} does not update DTensor parameters (shape {tuple(p.shape)}, {placements}): it needs inner "
                "products over whole layers, and a shard has only its own. Use plain tensors, with DDP on several ranks"
            )
        if any(placement.is_partial() for placement in placements):
            raise TypeError(
                f"{owner} cannot update a DTensor of partial values (shape {tuple(p.shape)}, {placements}); "
                "redistribute it to Shard or Replicate"
            )
    if type(p).__name__ == "FlatParameter" or getattr(p, "_fsdp_flattened", False):
        raise TypeError(
            f"{owner} does not update parameters flattened by FSDP1: it works layer by layer, and FSDP1 concatenates "
            "layers and cuts them up. Use FSDP2 (fully_shard) or DDP"
        )
    if hasattr(p, "ds_id"):
        raise TypeError(
            f"{owner} does not update parameters partitioned by DeepSpeed ZeRO stage 3: it works layer by layer, and "
            "a partition is not a layer. Use FSDP2, ZeRO stage 0 or DDP"
        )


class GivenParams:
    """The parameters that the optimizer was given, to recognise tensors that replace them later."""

    def __init__(self) -> None:
        self._shapes: dict[int, list[torch.Size | None]] = {}  # by the group's id
        # by the parameter's id; not a weak reference, with which torch.utils.swap_tensors (Module.to) refuses a tensor
        self._given: dict[int, type] = {}

    def add(self, group: dict[str, Any]) -> None:
        self._shapes[id(group)] = [None if is_uninitialized(p) else p.shape for p in group["params"]]
        self._given.update({id(p): type(p) for p in group["params"]})

    def check(self, group: dict[str, Any], owner: str) -> None:
        """Refuse a group whose tensors were replaced by flat partitions; accept others of any shape."""
        shapes = self._shapes.get(id(group), [])
        for position, p in enumerate(group["params"]):
            check_whole(p, owner, sharded=True)
            # the type too: a bare tensor may have the id of a parameter that is gone
            if self._given.get(id(p)) is type(p) or is_uninitialized(p):
                continue
            shape = shapes[position] if position < len(shapes) else None
            # a module's own new parameter may be 1-D and of any length; ZeRO's partitions are bare tensors
            if p.ndim == 1 and p.shape != shape and (type(p) is Tensor or (shape is not None and len(shape) != 1)):
                raise TypeError(
                    f"{owner}: a parameter group that was given {len(shapes)} tensors now holds a flat tensor of "
                    f"{p.numel()} elements at position {position}. DeepSpeed ZeRO stages 1 to 3 replace layers by flat "
                    f"partitions like this, and {owner} works layer by layer. Use FSDP2, ZeRO stage 0 or DDP"
                )
            self._given[id(p)] = type(p)  # accepted, it may later stand at another position


def part_builder() -> str | None:
    """The library that is building this optimizer for a part of a model, or None. Reads the call stack."""
    frame: Any = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__name__") in UNTRACED_BY or _in_a_constructor(frame)):
        frame = frame.f_back
    return None if frame is None else PART_BUILDERS.get(frame.f_globals.get("__name__", ""))


def initializes_state() -> bool:
    """Whether torch.distributed.checkpoint or torchtitan calls the step, with zero gradients, to create the state."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if (frame.f_code.co_name, frame.f_globals.get("__name__")) in STATE_INITIALIZERS:
            return True
        frame = frame.f_back
    return False


def _in_a_constructor(frame: Any) -> bool:
    return (
        frame.f_code.co_name == "__init__"
        and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)
        and frame.f_globals.get("__name__", "") not in PART_BUILDERS
    )


def check_clipping(builder: str | None, owner: str) -> None:
    """Refuse ``clip_norm`` if the optimizer sees only a part of the model, because the norm would be of that part."""
    if builder is not None:
        raise ValueError(
            f"clip_norm inside {builder} would clip each part of the model by its own norm: {USE_CLIP_GRAD_NORM}"
        )
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"{owner} with clip_norm cannot step inside a backward pass, where not all gradients are known; "
            f"{USE_CLIP_GRAD_NORM}"
        )
