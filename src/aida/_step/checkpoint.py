"""What a checkpoint must hold, and how its tensors pass through torch's loader unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from aida._step.sharding import copy_part_


class Sealed:
    """A wrapper that torch's loader passes through. It would cast a plain tensor to the parameter's dtype."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def opened(state: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a state that may be sealed."""
    return {name: value.value if isinstance(value, Sealed) else value for name, value in state.items()}


@dataclass(frozen=True)
class StateSchema:
    """The state that an optimizer keeps per parameter and per group, which its checkpoints must hold."""

    owner: str
    #: Names of a parameter's state, in order. Those that are not moments hold one number.
    keys: tuple[str, ...]
    #: Names of the state tensors with the parameter's shape.
    moments: tuple[str, ...]
    #: Keys that every saved group must have. Other keys have defaults, or did not exist in older versions.
    group_keys: tuple[str, ...]
    #: Maps a saved state to the names of its tensors with the parameter's shape, and of others that it must have.
    saved_names: Callable[[Mapping[str, Any]], tuple[tuple[str, ...], tuple[str, ...]]] | None = None
    #: Maps a parameter and its saved group to the shape of its counters.
    counter_shape: Callable[[Tensor, Mapping[str, Any]], tuple[int, ...]] = lambda p, group: ()

    def seal(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check a state dict against the optimizer, then seal the values of its state."""
        self._check(optimizer, state_dict)
        state = dict(state_dict["state"])  # values that hooks keep beside the parameters are left alone
        for group in state_dict["param_groups"]:
            for key in group["params"]:
                if key in state:
                    state[key] = {name: Sealed(value) for name, value in state[key].items()}
        return {**state_dict, "state": state}

    def unseal(
        self,
        state: dict[str, Any],
        p: Tensor,
        dtype: torch.dtype,
        counters: torch.device | None = None,
        without: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """A parameter's state as a step needs it: moments in ``dtype`` placed as the parameter, counters in float32.

        ``counters`` is the device of the counters; None means the parameter's device. Keys in ``without`` are left out.
        """
        values = opened(state)
        loaded: dict[str, Any] = {}
        for name in (key for key in self.keys if key not in without):
            value = values.pop(name, 0.0)
            if name in self.moments:
                # a copy in the parameter's memory format, which shares no memory with the checkpoint
                loaded[name] = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format)
                copy_part_(loaded[name], value)
            else:
                number = torch.as_tensor(value, dtype=torch.float32).to(counters or p.device, copy=True)
                loaded[name] = number.reshape(()) if number.numel() == 1 else number
        return {**loaded, **values}

    def _check(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        for index, group in enumerate(state_dict["param_groups"]):
            missing = [key for key in self.group_keys if key not in group]
            if missing:
                raise ValueError(
                    f"this state dict is not {self.owner}'s: its parameter group {index} lacks {', '.join(missing)} "
                    f"and has {', '.join(key for key in group if key != 'params')}. Load it into the optimizer that "
                    f"saved it, or start {self.owner} without it"
                )
        ids = [(key, group) for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for (key, group), p in zip(ids, params, strict=False):  # torch itself reports groups of other sizes
            saved = state_dict["state"].get(key)
            if saved:
                self._check_state(key, saved, p, group)

    def _check_state(self, key: Any, saved: dict[str, Any], p: Tensor, group: Mapping[str, Any]) -> None:
        moments, others = self.saved_names(saved) if self.saved_names else (self.moments, ())
        required = ("step", *moments, *others)
        missing = [name for name in required if name not in saved]
        if missing:
            raise ValueError(
                f"the state of parameter {key} is not {self.owner}'s: it lacks {', '.join(missing)} and has "
                f"{', '.join(map(str, saved))}. Load it into the optimizer that saved it, or start {self.owner} "
                "without it"
            )
        for name in moments:
            value = saved[name]
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} of parameter {key} is a {type(value).__name__}; it must be a tensor")
            if value.shape != p.shape:
                raise ValueError(
                    f"{name} of parameter {key} has shape {tuple(value.shape)} but the parameter has "
                    f"{tuple(p.shape)}: the checkpoint is of another model, or its parameters come in another order"
                )
            if value.is_complex() != p.is_complex() and value.dtype != torch.uint8:
                raise ValueError(f"{name} of parameter {key} is {value.dtype} but the parameter is {p.dtype}")
        step = saved.get("step")
        if isinstance(step, Tensor) and step.numel() != 1 and step.shape != (shape := self.counter_shape(p, group)):
            wanted = f"have shape {shape}, one number per layer" if shape else "be one number"
            raise ValueError(f"step of parameter {key} has shape {tuple(step.shape)}; it must {wanted}")
