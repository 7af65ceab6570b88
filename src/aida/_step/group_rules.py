"""Checks of parameter groups that Aida and the baselines share: spelling of keys, values, tensors.

An error names the value, the rule and the way out. If torch.optim refuses the same thing, the error starts with
torch's words, so that code that matches them keeps working.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import Optimizer

#: Dtypes of parameters, with the dtype of their state: at least float32, because bf16 and fp16 are too coarse for
#: moments (docs/numerics.md).
STATE_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex128: torch.complex128,
    torch.complex64: torch.complex64,
    torch.complex32: torch.complex64,
}

#: Other common names of our keys.
ALIASES = {
    **dict.fromkeys(("K", "k", "num_projections"), "projections"),
    **dict.fromkeys(("beta", "beta1", "beta2"), "betas"),
    **dict.fromkeys(("decoupled", "weight_decouple", "decouple_weight_decay"), "decoupled_weight_decay"),
    **dict.fromkeys(("max_norm", "clip_grad_norm", "max_grad_norm"), "clip_norm"),
    "learning_rate": "lr",
    "epsilon": "eps",
    "wd": "weight_decay",
    "nan": "nonfinite",
}

#: Keys that schedulers and frameworks add. The spelling check must not take them for misspelt keys of ours.
FOREIGN_KEYS = frozenset(
    {
        "params", "param_names", "name", "names", "initial_lr", "base_lr", "max_lr", "min_lr", "swa_lr",
        "lr_scale", "lr_mult", "lr_multiplier", "wd_mult", "wd_scale", "wd_multiplier",
        "weight_decay_mult", "weight_decay_scale", "initial_weight_decay", "base_weight_decay",
        "base_momentum", "max_momentum", "initial_betas", "layer_id", "layer_name", "group_name",
    }
)  # fmt: skip

#: Refuses a CUDA graph capture of groups that are not capturable. torch 2.13 renamed it, and the old name warns.
check_capture: Callable[[Optimizer], None] = getattr(
    Optimizer, "_accelerator_graph_capture_health_check", None
) or getattr(Optimizer, "_cuda_graph_capture_health_check")  # noqa: B009


def check_names(group: Mapping[str, Any], known: Sequence[str], owner: str) -> None:
    """Refuse a key that looks like a misspelt known name. Other unknown keys are allowed."""
    for key in group:
        if key in known or key in FOREIGN_KEYS or not isinstance(key, str):
            continue
        meant: str | None = ALIASES.get(key)
        if meant not in known:
            meant = next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.85)), None)
        if meant is not None:
            raise ValueError(
                f"parameter group key {key!r} is not a hyper-parameter of {owner} and would be ignored; "
                f"did you mean {meant!r}? {owner} knows {', '.join(known)}"
            )


def check_param(p: Tensor, owner: str) -> None:
    if p.dtype not in STATE_DTYPES:
        raise TypeError(
            f"{owner} updates floating-point and complex parameters, not {p.dtype} (shape {tuple(p.shape)}); "
            "leave it out of the optimizer, or keep a float32 or bf16 master copy and optimize that"
        )
    if p.layout != torch.strided:
        raise TypeError(f"{owner} updates dense parameters, not {p.layout} (shape {tuple(p.shape)})")
    if p.is_conj() or p.is_neg():
        raise TypeError(
            f"a parameter (shape {tuple(p.shape)}) has PyTorch's lazy conj or neg bit set, so it cannot be updated in "
            "place; pass tensor.resolve_conj().resolve_neg()"
        )


def is_uninitialized(p: Tensor) -> bool:
    """Whether the parameter belongs to a lazy module that has not seen its input yet."""
    return isinstance(p, UninitializedTensorMixin)


def check_given(p: Tensor, owner: str) -> None:
    """Refuse a new parameter that no step can update. A frozen one gets no gradient and may have any dtype."""
    if not is_uninitialized(p) and p.requires_grad:
        check_param(p, owner)


def drop_duplicates(group: dict[str, Any]) -> None:
    """Keep each parameter once. torch only warns about duplicates, but each path would update them differently."""
    first = list({id(p): i for i, p in reversed(list(enumerate(group["params"])))}.values())[::-1]
    for key in ("params", "param_names"):
        if key in group and len(first) < len(group[key]):
            group[key] = [group[key][i] for i in first]


def check_lr(group: Mapping[str, Any]) -> None:
    lr = group["lr"]
    refuse_array("lr", lr)
    if isinstance(lr, Tensor):
        if group["foreach"] and not group["capturable"]:
            raise ValueError(
                "lr as a Tensor is not supported for capturable=False and foreach=True; "
                "leave foreach=None, or set capturable=True"
            )
        if lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, not of shape {tuple(lr.shape)}")
        if lr.is_cuda or traced():
            return  # reading it would synchronize or break the trace
    if not is_finite(lr) or lr < 0:
        raise ValueError(f"Invalid learning rate: {lr}; lr must be a finite number >= 0, AdamW's default is 1e-3")


def check_betas(group: Mapping[str, Any], *, added: bool = True) -> None:
    """Refuse invalid betas. A float beside a Tensor is allowed later (``added=False``): schedulers set one."""
    try:
        beta1, beta2 = betas = group["betas"]
    except (TypeError, ValueError):
        raise ValueError(f"betas={group['betas']!r} must be a pair (beta1, beta2), such as (0.9, 0.999)") from None
    if added and isinstance(beta1, Tensor) != isinstance(beta2, Tensor):
        raise ValueError(f"betas must be either both floats or both Tensors, not {betas!r}")
    for index, beta in enumerate(betas):
        refuse_array(f"betas[{index}]", beta)
        if isinstance(beta, Tensor):
            if group["foreach"] and not group["capturable"]:
                raise ValueError(
                    f"betas[{index}] as a Tensor is not supported for capturable=False and foreach=True; "
                    "leave foreach=None, or set capturable=True"
                )
            if beta.numel() != 1:
                raise ValueError(f"Tensor betas[{index}] must be 1-element, not of shape {tuple(beta.shape)}")
            if beta.is_cuda or traced():
                continue
        if not is_finite(beta) or not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}; it must lie in [0, 1), such as 0.9")


def check_eps(group: Mapping[str, Any]) -> None:
    eps = group["eps"]
    refuse_tensor(group, "eps")
    if not is_finite(eps) or eps < torch.finfo(torch.float32).tiny:
        raise ValueError(
            f"Invalid epsilon value: {eps}; eps must be a finite number > 0 that float32 can hold, because it alone "
            "keeps the stepsize of a weight without gradient finite; the paper uses 1e-8 to 1e-16"
        )


def check_weight_decay(group: Mapping[str, Any]) -> None:
    weight_decay = group["weight_decay"]
    refuse_tensor(group, "weight_decay")
    if not is_finite(weight_decay) or weight_decay < 0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}; it must be a finite number >= 0, 0 turns it off")


def refuse_tensor(group: Mapping[str, Any], name: str) -> None:
    """Refuse a tensor, which could change in place unnoticed, unless the step is differentiable."""
    value = group[name]
    refuse_array(name, value)
    if isinstance(value, Tensor) and not group.get("differentiable"):
        raise TypeError(f"{name} must be a number, not a Tensor ({value!r}); only lr and betas may be Tensors")


def refuse_array(name: str, value: Any) -> None:
    """Refuse a NumPy array: like a list it can change in place, and ``group["lr"] *= 0.1`` does that to it."""
    if not isinstance(value, Tensor) and hasattr(value, "__array__") and hasattr(value, "__setitem__"):
        raise TypeError(f"{name} must be a number, not an array ({value!r}); pass float({name})")


def is_finite(value: Any) -> bool:
    try:  # detached, because torch warns when a tensor that requires grad is converted to a number
        return math.isfinite(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError):
        return False


def traced() -> bool:
    return torch.compiler.is_compiling()


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor holds its own memory. A subclass with ``__torch_dispatch__`` may keep its values elsewhere."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
