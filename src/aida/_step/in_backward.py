"""Steps inside the backward pass: each parameter is updated as soon as its gradient is complete."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from aida._step.group_rules import is_uninitialized
from aida._step.sharding import span_of


def register(optimizer: Optimizer) -> list[Any]:
    """Hooks that update each parameter and free its gradient. Returns their handles."""
    numbers, hooks = count(), []
    for index, group in enumerate(optimizer.param_groups):
        if group["clip_norm"] is not None:
            raise ValueError(
                f"clip_norm={group['clip_norm']!r} needs all gradients at once, and step_in_backward frees each one "
                "after its update; set clip_norm=None"
            )
        for p, number in zip(group["params"], numbers, strict=False):
            if is_uninitialized(p) or span_of(p) is not None:
                raise ValueError(
                    "step_in_backward does not support lazy or sharded parameters; call step() after the backward pass"
                )
            if p.requires_grad:
                hooks.append((p, partial(_step_one, optimizer, index, _part(optimizer, group, p, number))))
    return [p.register_post_accumulate_grad_hook(hook) for p, hook in hooks]


def _part(optimizer: Any, group: dict[str, Any], p: Tensor, number: int) -> Any:
    """An optimizer of one parameter, with caches of its own. Its values and state are those of the whole one."""
    part = type(optimizer)([{**_values(group), "params": [p]}])
    part._first_number = number
    return part


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _step_one(optimizer: Optimizer, index: int, part: Any, p: Tensor) -> None:
    part.param_groups[0].update(_values(optimizer.param_groups[index]))  # a scheduler may have changed lr
    part.state[p] = optimizer.state[p]
    part.step()
    p.grad = None
