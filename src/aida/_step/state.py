"""The state of one parameter: its tensors, their creation, and the check that they still fit.

The moments are float32 (``exp_avg``, ``exp_avg_var``), bf16 under the same names, or 8-bit codes with scales: those of
the first moment and those of the root of the second, whose range is half as wide in binades.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aida._step.checkpoint import StateSchema, opened
from aida._step.group_rules import STATE_DTYPES, is_plain
from aida._step.layers import ONE_LAYER_KEYS, Layers, layers_of
from aida._step.sharding import copy_part_, counter_like, is_dtensor, local
from aida._step.storage import FULL, Storage, local_block_shape, scales_like
from aida.rounding import HALF, block_scales, decode, encode, flat

MOMENTS = ("exp_avg", "exp_avg_var")
CODES = ("exp_avg_codes", "exp_avg_std_codes")
SCALES = ("exp_avg_scales", "exp_avg_std_scales")

#: What rounding removed from a bf16 or fp16 parameter, with ``kahan_sum``.
COMPENSATION = "compensation"

#: What a checkpoint of Aida holds.
SCHEMA = StateSchema(
    owner="Aida",
    keys=("step", *MOMENTS, "skipped"),
    moments=MOMENTS,
    group_keys=("lr", "betas", "eps", "weight_decay", "projections"),
    saved_moments=lambda saved: CODES if CODES[0] in saved else MOMENTS,
    counter_shape=lambda p, group: layers_of(p, {**ONE_LAYER_KEYS, **group}).shape,
)


def state_keys(storage: Storage) -> tuple[str, ...]:
    """The names of the state tensors."""
    moments = (*CODES, *SCALES) if storage.state == "fp8" else MOMENTS
    return "step", *moments, "skipped", *((COMPENSATION,) if storage.rounding == "kahan" else ())


def rows_of(state: Mapping[str, Any], storage: Storage) -> list[Tensor | None]:
    """The local state tensors in the order of :meth:`Batch.rows`; None for those that this storage does not have."""
    moments = CODES if storage.state == "fp8" else MOMENTS
    names = (*moments, "step", "skipped", *SCALES, COMPENSATION)
    present = state_keys(storage)
    return [local(state[name]) if name in present else None for name in names]


def prepare(state: dict[str, Any], p: Tensor, layers: Layers, storage: Storage) -> None:
    """Create what is missing of a parameter's state, and convert what is stored in another form."""
    wanted = state_keys(storage)
    if all(name in state for name in wanted) and (storage.state == "fp8" or not _is_other_precision(state, p, storage)):
        return
    if CODES[0] in state or MOMENTS[0] in state:
        _convert(state, p, storage)
    for name in wanted:
        if name not in state:
            state[name] = _new(name, p, layers, storage)


def _is_other_precision(state: Mapping[str, Any], p: Tensor, storage: Storage) -> bool:
    found = {state[name].dtype for name in MOMENTS if isinstance(state[name], Tensor)}
    return found <= {torch.bfloat16, torch.float32} and found != {_moment_dtype(p, storage)}


def _dtype(name: str, p: Tensor, storage: Storage) -> torch.dtype:
    """Of a state tensor with the parameter's shape."""
    return torch.uint8 if name in CODES else p.dtype if name == COMPENSATION else _moment_dtype(p, storage)


def _moment_dtype(p: Tensor, storage: Storage) -> torch.dtype:
    return torch.bfloat16 if storage.state == "bfloat16" else STATE_DTYPES[p.dtype]


def _new(name: str, p: Tensor, layers: Layers, storage: Storage) -> Tensor:
    if name in SCALES:
        return scales_like(p)
    if name in ("step", "skipped"):
        # on the parameter's device, where a step is counted or skipped without synchronizing
        return counter_like(p, layers.shape, layers.local_shape, layers.dims)
    return torch.zeros_like(p, dtype=_dtype(name, p, storage), memory_format=torch.preserve_format)


def wide_moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The moments in float32 (or wider), whatever they are stored in; copies if they are stored in fewer bits."""
    if CODES[0] in state:
        return _decoded(state)
    return {name: state[name].float() if state[name].dtype == torch.bfloat16 else state[name] for name in MOMENTS}


def _convert(state: dict[str, Any], p: Tensor, storage: Storage) -> None:
    """Store the moments in another form, rounded to nearest."""
    wide = wide_moments(state)
    for name in (*MOMENTS, *CODES, *SCALES):
        state.pop(name, None)
    if storage.state == "fp8":
        for name, codes, scales in zip(MOMENTS, CODES, SCALES, strict=True):
            values = local(wide[name])
            values = flat(values.sqrt() if name == MOMENTS[1] else values)
            state[codes] = torch.zeros_like(p, dtype=torch.uint8, memory_format=torch.preserve_format)
            state[scales] = scales_like(p)
            found = block_scales(values)
            flat(local(state[codes])).copy_(encode(values, found, HALF))
            local(state[scales]).view(-1).copy_(found)
    else:
        for name in MOMENTS:
            state[name] = wide[name].to(_moment_dtype(p, storage))


def restored(state: dict[str, Any], p: Tensor, layers: Layers, storage: Storage = FULL) -> dict[str, Any]:
    """A parameter's state from a checkpoint as a step needs it. It shares no memory with the checkpoint."""
    saved = opened(state)
    codes = {name: saved.pop(name) for name in (*CODES, *SCALES) if name in saved}
    compensation = saved.pop(COMPENSATION, None)
    as_codes = bool(codes) and storage.state == "fp8" and _can_take(codes, p)
    if codes and not as_codes:
        saved |= _decoded(codes)
    known = SCHEMA.unseal(saved, p, STATE_DTYPES[p.dtype], without=MOMENTS if as_codes else ())
    if as_codes:
        for name, value in codes.items():
            known[name] = scales_like(p) if name in SCALES else _new(name, p, layers, storage)
            copy_part_(known[name], value)
    elif storage.state != "float32":
        _convert(known, p, storage)
    if storage.rounding == "kahan":
        known[COMPENSATION] = _new(COMPENSATION, p, layers, storage)
        if compensation is not None:
            copy_part_(known[COMPENSATION], compensation)
    if layers.shape:
        for name in ("step", "skipped"):
            new = counter_like(p, layers.shape, layers.local_shape, layers.dims)
            copy_part_(new, known[name].expand(layers.shape) if known[name].ndim == 0 else known[name])
            known[name] = new
    return known


def _can_take(codes: Mapping[str, Tensor], p: Tensor) -> bool:
    """Whether blocks of a checkpoint are blocks of this parameter too: its elements are in the same memory order."""
    saved = codes[CODES[0]]
    if is_dtensor(saved) or is_dtensor(p):
        return is_dtensor(saved) or saved.is_contiguous()
    return saved.stride() == torch.empty_like(p, memory_format=torch.preserve_format).stride()


def _decoded(codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moments of a checkpoint with 8-bit state, in float32 and placed as there."""
    found = {}
    for name, of_codes, of_scales in zip(MOMENTS, CODES, SCALES, strict=True):
        stored = codes[of_codes]
        wide = torch.empty_like(stored, dtype=torch.float32)
        flat(local(wide)).copy_(decode(flat(local(stored)), local(codes[of_scales]).reshape(-1)))
        found[name] = wide
    found[MOMENTS[1]].square_()
    return found


def misfit(p: Tensor, grad: Tensor, state: dict[str, Any], layers: Layers, storage: Storage = FULL) -> str:
    """An error message if a state tensor or the gradient does not fit the parameter, else an empty string.

    Fused paths read raw addresses, and would read past the end of a tensor that is too short.
    """
    names = state_keys(storage)
    for name in names:
        if name not in ("step", "skipped") and is_dtensor(state[name]) != is_dtensor(p):
            return f"is a {type(p).__name__}, but its {name} is a {type(state[name]).__name__}; load a state_dict"
    forms = {name: _form(name, p, layers, storage) for name in names}
    p, state = local(p), {name: local(state[name]) for name in names}
    for name in names:
        kept = state[name]
        if not isinstance(kept, Tensor) or kept.layout != torch.strided or (is_plain(p) and not is_plain(kept)):
            return f"has a {type(kept).__name__} as its {name}, which must be a dense tensor; load a state_dict"
        if (kept.dtype, kept.shape) != forms[name] or kept.device != p.device:
            return _unlike(p, name, kept)
        if kept.is_neg() or kept.is_conj():
            return f"has PyTorch's lazy conj or neg bit set on its {name}; keep {name}.resolve_conj().resolve_neg()"
    if grad.shape != p.shape or grad.device != p.device:
        return _unlike(p, "gradient", grad)
    for name, tensor in (("values", p), ("gradient", grad), *state.items()):
        if is_plain(tensor) and _bytes_needed(tensor) > tensor.untyped_storage().nbytes():
            return f"lost memory: its {name} need more than their storage holds, which was freed or resized"
    return ""


def _bytes_needed(tensor: Tensor) -> int:
    """The size that a tensor needs its storage to have."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _form(name: str, p: Tensor, layers: Layers, storage: Storage) -> tuple[torch.dtype, torch.Size]:
    """Dtype and shape of a state tensor on this rank."""
    if name in ("step", "skipped"):
        return torch.float32, torch.Size(layers.local_shape)
    if name in SCALES:
        return torch.uint8, local_block_shape(p)
    return _dtype(name, p, storage), local(p).shape


def _unlike(p: Tensor, name: str, other: Tensor) -> str:
    return (
        f"is {_in_words(p)}, but its {name} is {_in_words(other)}. Change a model's dtype, size or device before its "
        "first step, or build a new optimizer afterwards and load the state of this one"
    )


def _in_words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"
