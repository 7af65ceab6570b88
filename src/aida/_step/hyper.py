"""The hyper-parameters of one parameter group: their names and the checks of their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from aida._step.group_rules import check_betas, check_eps, check_lr, check_weight_decay, is_finite, refuse_tensor
from aida._step.layers import ONE_LAYER_KEYS, check_layer_keys
from aida._step.storage import STORAGE_DEFAULTS, check_storage_keys

Nonfinite = Literal["skip", "propagate", "raise"]

NONFINITE: tuple[Nonfinite, ...] = ("skip", "propagate", "raise")

#: The hyper-parameters a fused kernel reads, in the order of :class:`Hyper`'s fields.
HYPER_KEYS = (
    "lr", "betas", "eps", "weight_decay", "projections", "xi", "decoupled_weight_decay", "clip_norm", "nonfinite",
    "maximize",
)  # fmt: skip

#: torch's flags, which select a path and do not change results.
FLAG_KEYS = ("foreach", "fused", "capturable", "differentiable")

#: Defaults of keys that a saved group may lack, in older checkpoints or in those of another Aida.
OPTIONAL_DEFAULTS: dict[str, Any] = {
    "xi": 1e-20, "decoupled_weight_decay": False, "clip_norm": None, "nonfinite": "skip", "maximize": False,
    "foreach": None, "fused": None, "capturable": False, "differentiable": False, **ONE_LAYER_KEYS,
    **STORAGE_DEFAULTS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hyper:
    """The hyper-parameters of one group."""

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float
    weight_decay: float
    projections: int
    xi: float
    decoupled_weight_decay: bool
    clip_norm: float | None
    nonfinite: Nonfinite
    maximize: bool

    @property
    def rate(self) -> float | Tensor:
        """The learning rate; a one-element tensor is reshaped to 0-dim."""
        return self.lr.reshape(()) if isinstance(self.lr, Tensor) else self.lr

    @property
    def l2(self) -> float:
        """L2 weight decay, which is added to the gradient; 0 if decay is decoupled."""
        return 0.0 if self.decoupled_weight_decay else self.weight_decay

    @property
    def decay(self) -> float:
        """Decoupled weight decay: every step subtracts ``lr * decay * p``; 0 if decay is L2."""
        return self.weight_decay if self.decoupled_weight_decay else 0.0

    @property
    def sign(self) -> float:
        return -1.0 if self.maximize else 1.0

    @property
    def has_tensor_betas(self) -> bool:
        return isinstance(self.beta1, Tensor) or isinstance(self.beta2, Tensor)


def from_group(group: dict[str, Any]) -> Hyper:
    lr, betas, *rest = [group[key] for key in HYPER_KEYS]
    return Hyper(lr, *betas, *rest)


def check_group(group: dict[str, Any], *, added: bool = True) -> None:
    """Refuse invalid values. Called when a group is added and when a value changed."""
    check_lr(group)
    check_betas(group, added=added)
    check_eps(group)
    check_weight_decay(group)
    projections = group["projections"]
    if isinstance(projections, bool) or not isinstance(projections, int) or projections < 0:
        raise ValueError(f"projections={projections!r} must be an integer >= 0; the paper uses 1 or 2, 0 is AdaBelief")
    xi = group["xi"]
    refuse_tensor(group, "xi")
    if not is_finite(xi) or xi < torch.finfo(torch.float32).tiny:
        raise ValueError(f"xi={xi!r} must be a finite number > 0 that float32 can hold; the paper uses 1e-20")
    clip_norm = group["clip_norm"]
    refuse_tensor(group, "clip_norm")
    if clip_norm is not None and (not is_finite(clip_norm) or clip_norm <= 0):
        raise ValueError(f"clip_norm={clip_norm!r} must be a finite number > 0, or None for no clipping")
    if group["nonfinite"] not in NONFINITE:
        raise ValueError(f"nonfinite={group['nonfinite']!r} must be one of {', '.join(map(repr, NONFINITE))}")
    check_layer_keys(group)
    check_storage_keys(group)
    _check_flags(group)


def _check_flags(group: dict[str, Any]) -> None:
    if group["fused"] and group["differentiable"]:
        raise RuntimeError(
            "`fused` does not support `differentiable`: kernels record no autograd graph; leave fused=None"
        )
    if group["fused"] and group["foreach"]:
        raise RuntimeError(
            "`fused` and `foreach` cannot be `True` together: they select different paths; leave one of them None"
        )
