"""The state of one parameter: its tensors, their creation, and the check that they still fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aida._step.checkpoint import StateSchema
from aida._step.group_rules import STATE_DTYPES, is_plain
from aida._step.layers import ONE_LAYER_KEYS, Layers, layers_of
from aida._step.sharding import copy_part_, counter_like, is_dtensor, local

#: What a checkpoint of Aida holds.
SCHEMA = StateSchema(
    owner="Aida",
    keys=("step", "exp_avg", "exp_avg_var", "skipped"),
    moments=("exp_avg", "exp_avg_var"),
    group_keys=("lr", "betas", "eps", "weight_decay", "projections"),
    counter_shape=lambda p, group: layers_of(p, {**ONE_LAYER_KEYS, **group}).shape,
)


def make_missing(state: dict[str, Any], p: Tensor, layers: Layers) -> None:
    """Create the missing tensors of a parameter's state. Existing ones are kept."""
    for name in SCHEMA.keys:
        if name not in state:
            # counters too are on the parameter's device, where a step is counted or skipped without synchronizing
            state[name] = (
                torch.zeros_like(p, dtype=STATE_DTYPES[p.dtype], memory_format=torch.preserve_format)
                if name in SCHEMA.moments
                else counter_like(p, layers.shape, layers.local_shape, layers.dims)
            )


def restored(state: dict[str, Any], p: Tensor, layers: Layers) -> dict[str, Any]:
    """A parameter's state from a checkpoint as a step needs it. It shares no memory with the checkpoint."""
    known = SCHEMA.unseal(state, p, STATE_DTYPES[p.dtype])
    if layers.shape:
        for name in ("step", "skipped"):
            new = counter_like(p, layers.shape, layers.local_shape, layers.dims)
            copy_part_(new, known[name].expand(layers.shape) if known[name].ndim == 0 else known[name])
            known[name] = new
    return known


def misfit(p: Tensor, grad: Tensor, state: dict[str, Any], layers: Layers) -> str:
    """An error message if a state tensor or the gradient does not fit the parameter, else an empty string.

    Fused paths read raw addresses, and would read past the end of a tensor that is too short.
    """
    for name in SCHEMA.moments:
        if is_dtensor(state[name]) != is_dtensor(p):
            return f"is a {type(p).__name__}, but its {name} is a {type(state[name]).__name__}; load a state_dict"
    p, state = local(p), {name: local(state[name]) for name in SCHEMA.keys}
    for name in SCHEMA.keys:
        kept = state[name]
        if not isinstance(kept, Tensor) or kept.layout != torch.strided or (is_plain(p) and not is_plain(kept)):
            return f"has a {type(kept).__name__} as its {name}, which must be a dense tensor; load a state_dict"
        if (kept.dtype, kept.shape) != _form(name, p, layers) or kept.device != p.device:
            return _unlike(p, name, kept)
        if kept.is_neg() or kept.is_conj():
            return f"has PyTorch's lazy conj or neg bit set on its {name}; keep {name}.resolve_conj().resolve_neg()"
    if grad.shape != p.shape or grad.device != p.device:
        return _unlike(p, "gradient", grad)
    for name, tensor in (("values", p), ("gradient", grad), *((name, state[name]) for name in SCHEMA.keys)):
        if is_plain(tensor) and _bytes_needed(tensor) > tensor.untyped_storage().nbytes():
            return f"lost memory: its {name} need more than their storage holds, which was freed or resized"
    return ""


def _bytes_needed(tensor: Tensor) -> int:
    """The size that a tensor needs its storage to have."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _form(name: str, p: Tensor, layers: Layers) -> tuple[torch.dtype, torch.Size]:
    """Dtype and shape of a state tensor on this rank."""
    if name in SCHEMA.moments:
        return STATE_DTYPES[p.dtype], p.shape
    return torch.float32, torch.Size(layers.local_shape)


def _unlike(p: Tensor, name: str, other: Tensor) -> str:
    return (
        f"is {_in_words(p)}, but its {name} is {_in_words(other)}. Change a model's dtype, size or device before its "
        "first step, or build a new optimizer afterwards and load the state of this one"
    )


def _in_words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"
