"""What a checkpoint must look like, and how its tensors pass through torch's loader untouched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

STATE_KEYS = ("step", "exp_avg", "exp_avg_var", "skipped")
MOMENTS = ("exp_avg", "exp_avg_var")

#: Without these a saved group is not Aida's; the rest has defaults, or did not exist in older versions.
REQUIRED_GROUP_KEYS = ("lr", "betas", "eps", "weight_decay", "projections")


class Sealed:
    """A saved value that torch's loader hands through: it would cast a bare tensor to the parameter's dtype."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def seal(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check a state dict against the optimizer, then seal the values of its state."""
    _check(optimizer, state_dict)
    state = {key: {name: Sealed(value) for name, value in saved.items()} for key, saved in state_dict["state"].items()}
    return {**state_dict, "state": state}


def unseal(state: dict[str, Any], p: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """A parameter's state as a step needs it: moments in ``dtype``, counters in float32, all on its device."""
    values = {name: value.value if isinstance(value, Sealed) else value for name, value in state.items()}
    loaded: dict[str, Any] = {}
    for name in STATE_KEYS:
        value = values.pop(name, 0.0)
        if name in MOMENTS:
            # a copy in the parameter's memory layout: the loader must not share tensors with the checkpoint
            loaded[name] = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format).copy_(value)
        else:
            loaded[name] = torch.as_tensor(value, dtype=torch.float32).to(p.device, copy=True).reshape(())
    return {**loaded, **values}


def _check(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    for index, group in enumerate(state_dict["param_groups"]):
        missing = [key for key in REQUIRED_GROUP_KEYS if key not in group]
        if missing:
            raise ValueError(
                f"this state dict is not Aida's: its parameter group {index} lacks {', '.join(missing)} and has "
                f"{', '.join(key for key in group if key != 'params')}. Load it into the optimizer that saved it, "
                "or start Aida without it"
            )
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for key, p in zip(ids, params, strict=False):  # torch itself reports groups of other sizes
        saved = state_dict["state"].get(key)
        if saved:
            _check_state(key, saved, p)


def _check_state(key: Any, saved: dict[str, Any], p: Tensor) -> None:
    missing = [name for name in ("step", *MOMENTS) if name not in saved]
    if missing:
        raise ValueError(
            f"the state of parameter {key} is not Aida's: it lacks {', '.join(missing)} and has "
            f"{', '.join(map(str, saved))}. Load it into the optimizer that saved it, or start Aida without it"
        )
    for name in MOMENTS:
        value = saved[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} of parameter {key} is a {type(value).__name__}; it must be a tensor")
        if value.shape != p.shape:
            raise ValueError(
                f"{name} of parameter {key} has shape {tuple(value.shape)} but the parameter has {tuple(p.shape)}: "
                "the checkpoint is of another model, or its parameters come in another order"
            )
        if value.is_complex() != p.is_complex():
            raise ValueError(f"{name} of parameter {key} is {value.dtype} but the parameter is {p.dtype}")
    step = saved["step"]
    if isinstance(step, Tensor) and step.numel() != 1:
        raise ValueError(f"step of parameter {key} has shape {tuple(step.shape)}; it must be one number")
