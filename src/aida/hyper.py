"""The hyper-parameters of one parameter group: their names, their rules, their errors.

Every error names the value, the rule and the way out, and starts with torch's own words where
torch.optim.AdamW refuses the same thing, so that code which matches on those words keeps working.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

Nonfinite = Literal["skip", "propagate", "raise"]

NONFINITE: tuple[Nonfinite, ...] = ("skip", "propagate", "raise")

#: The hyper-parameters a fused kernel reads, in the order of :class:`Hyper`'s fields.
HYPER_KEYS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "projections",
    "xi",
    "decoupled_weight_decay",
    "clip_norm",
    "nonfinite",
    "maximize",
)

#: torch's switches: they choose a path and change no result.
FLAG_KEYS = ("foreach", "fused", "capturable", "differentiable")

#: What a group may lack in a checkpoint (an older one, or one of another implementation of Aida).
OPTIONAL_DEFAULTS: dict[str, Any] = {
    "xi": 1e-20,
    "decoupled_weight_decay": False,
    "clip_norm": None,
    "nonfinite": "skip",
    "maximize": False,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}

#: Names other people give to the same thing.
ALIASES = {
    "K": "projections",
    "k": "projections",
    "num_projections": "projections",
    "learning_rate": "lr",
    "epsilon": "eps",
    "wd": "weight_decay",
    "beta": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "decoupled": "decoupled_weight_decay",
    "weight_decouple": "decoupled_weight_decay",
    "decouple_weight_decay": "decoupled_weight_decay",
    "max_norm": "clip_norm",
    "clip_grad_norm": "clip_norm",
    "max_grad_norm": "clip_norm",
    "nan": "nonfinite",
}

#: Keys that schedulers and frameworks add. The spelling check must not mistake them for ours.
FOREIGN_KEYS = frozenset(
    {
        "params", "param_names", "name", "names", "initial_lr", "base_lr", "max_lr", "min_lr", "swa_lr",
        "lr_scale", "lr_mult", "lr_multiplier", "wd_mult", "wd_scale", "wd_multiplier",
        "weight_decay_mult", "weight_decay_scale", "initial_weight_decay", "base_weight_decay",
        "base_momentum", "max_momentum", "initial_betas", "layer_id", "layer_name", "group_name",
    }
)  # fmt: skip

_read_hyper = itemgetter(*HYPER_KEYS)


@dataclass(frozen=True, slots=True)
class Hyper:
    """The values one group updates its tensors with."""

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
    def l2(self) -> float:
        """Weight decay that enters the gradient."""
        return 0.0 if self.decoupled_weight_decay else self.weight_decay

    @property
    def decay(self) -> float:
        """Weight decay that shrinks the parameter directly, times the learning rate."""
        return self.weight_decay if self.decoupled_weight_decay else 0.0

    @property
    def sign(self) -> float:
        return -1.0 if self.maximize else 1.0

    @property
    def has_tensor_betas(self) -> bool:
        return isinstance(self.beta1, Tensor) or isinstance(self.beta2, Tensor)


def read_values(group: dict[str, Any]) -> tuple[Any, ...]:
    """The group's values as they lie there: cheap enough for every step, to see whether one changed."""
    values: tuple[Any, ...] = _read_hyper(group)
    return values


def from_values(values: tuple[Any, ...]) -> Hyper:
    lr, (beta1, beta2), eps, weight_decay, projections, xi, decoupled, clip_norm, nonfinite, maximize = values
    return Hyper(lr, beta1, beta2, eps, weight_decay, projections, xi, decoupled, clip_norm, nonfinite, maximize)


def check_group(group: dict[str, Any]) -> None:
    """Refuse values that no step could use. Called when a group is added and when a value changed."""
    _check_lr(group)
    _check_betas(group)
    eps = group["eps"]
    if not _is_finite(eps) or eps < torch.finfo(torch.float32).tiny:
        raise ValueError(
            f"Invalid epsilon value: {eps}; eps must be a finite number > 0 that float32 can hold, because it is"
            " all that keeps the stepsize of a weight without gradient finite; the paper uses 1e-8 to 1e-16"
        )
    weight_decay = group["weight_decay"]
    if not _is_finite(weight_decay) or weight_decay < 0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}; it must be a finite number >= 0, 0 turns it off")
    projections = group["projections"]
    if isinstance(projections, bool) or not isinstance(projections, int) or projections < 0:
        raise ValueError(f"projections={projections!r} must be an integer >= 0; the paper uses 1 or 2, 0 is AdaBelief")
    xi = group["xi"]
    if not _is_finite(xi) or xi <= 0:
        raise ValueError(f"xi={xi!r} must be a finite number > 0; the paper uses 1e-20")
    clip_norm = group["clip_norm"]
    if clip_norm is not None and (not _is_finite(clip_norm) or clip_norm <= 0):
        raise ValueError(f"clip_norm={clip_norm!r} must be a finite number > 0, or None for no clipping")
    if group["nonfinite"] not in NONFINITE:
        raise ValueError(f"nonfinite={group['nonfinite']!r} must be one of {', '.join(map(repr, NONFINITE))}")
    _check_flags(group)


def check_names(group: dict[str, Any]) -> None:
    """Refuse a key that is one of our names misspelt; leave alone what others keep in a group."""
    known = (*HYPER_KEYS, *FLAG_KEYS)
    for key in group:
        if key in known or key in FOREIGN_KEYS or not isinstance(key, str):
            continue
        meant = ALIASES.get(key) or next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.85)), None)
        if meant is not None:
            raise ValueError(
                f"parameter group key {key!r} is not a hyper-parameter of Aida and would be ignored; "
                f"did you mean {meant!r}? Aida knows {', '.join(known)}"
            )


def _check_lr(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if group["foreach"] and not group["capturable"]:
            raise ValueError(
                "lr as a Tensor is not supported for capturable=False and foreach=True; "
                "leave foreach=None, or set capturable=True"
            )
        if lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, not of shape {tuple(lr.shape)}")
        if lr.is_cuda or _traced():
            return  # reading it would stop the device, or break the trace
    if not _is_finite(lr) or lr < 0:
        raise ValueError(f"Invalid learning rate: {lr}; lr must be a finite number >= 0, AdamW's default is 1e-3")


def _check_betas(group: dict[str, Any]) -> None:
    try:
        beta1, beta2 = betas = group["betas"]
    except (TypeError, ValueError):
        raise ValueError(f"betas={group['betas']!r} must be a pair (beta1, beta2), such as (0.9, 0.999)") from None
    if isinstance(beta1, Tensor) != isinstance(beta2, Tensor):
        raise ValueError(f"betas must be either both floats or both Tensors, not {betas!r}")
    for index, beta in enumerate(betas):
        if isinstance(beta, Tensor):
            if group["foreach"] and not group["capturable"]:
                raise ValueError(
                    f"betas[{index}] as a Tensor is not supported for capturable=False and foreach=True; "
                    "leave foreach=None, or set capturable=True"
                )
            if beta.numel() != 1:
                raise ValueError(f"Tensor betas[{index}] must be 1-element, not of shape {tuple(beta.shape)}")
            if beta.is_cuda or _traced():
                continue
        if not _is_finite(beta) or not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}; it must lie in [0, 1), such as 0.9")


def _check_flags(group: dict[str, Any]) -> None:
    if group["fused"] and group["differentiable"]:
        raise RuntimeError(
            "`fused` does not support `differentiable`: a kernel leaves no autograd graph; leave fused=None"
        )
    if group["fused"] and group["foreach"]:
        raise RuntimeError(
            "`fused` and `foreach` cannot be `True` together: they name two paths; leave one of them None"
        )


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _traced() -> bool:
    return torch.compiler.is_compiling()
