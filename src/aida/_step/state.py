"""The state of one parameter: its tensors, their creation, and the check that they still fit.

The moments are float32 (``exp_avg``, ``exp_avg_var``), bf16 under the same names, or 8-bit codes with scales. The codes
of the second moment hold its root, whose range is half as wide, and leave out what eps has added to it, which follows
from the step counter. So a variance that is rounded to zero cannot make a stepsize exceed its bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from aida._step.checkpoint import StateSchema, opened
from aida._step.group_rules import STATE_DTYPES, is_plain
from aida._step.layers import ONE_LAYER_KEYS, Layers, layers_of
from aida._step.sharding import copy_part_, counter_like, is_dtensor, local
from aida._step.storage import FULL, OWN_KEYS, Storage, local_block_shape, places, scales_like
from aida.rounding import BLOCK, decoded, encode_
from aida.rule import eps_share

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
    saved_names=lambda saved: (CODES, SCALES) if CODES[0] in saved else (MOMENTS, ()),
    counter_shape=lambda p, group: layers_of(p, {**ONE_LAYER_KEYS, **group}).shape,
)


def sealed(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict checked and sealed, whose groups say how this optimizer stores its state."""
    found = SCHEMA.seal(optimizer, state_dict)
    own = [{key: group[key] for key in OWN_KEYS} for group in optimizer.param_groups]
    groups = state_dict["param_groups"]
    kept = [{**saved, **mine} for saved, mine in zip(groups, own, strict=False)]
    return {**found, "param_groups": [*kept, *groups[len(kept) :]]}  # torch itself reports another number of groups


@cache
def state_keys(storage: Storage) -> tuple[str, ...]:
    """The names of the state tensors."""
    moments = (*CODES, *SCALES) if storage.state == "fp8" else MOMENTS
    return "step", *moments, "skipped", *((COMPENSATION,) if storage.rounding == "kahan" else ())


def rows_of(state: Mapping[str, Any], storage: Storage) -> list[Tensor | None]:
    """The local state tensors in the order of :meth:`Batch.rows`; None for those that this storage does not have."""
    return [None if name is None else local(state[name]) for name in _row_names(storage)]


@cache
def _row_names(storage: Storage) -> tuple[str | None, ...]:
    moments = CODES if storage.state == "fp8" else MOMENTS
    present = state_keys(storage)
    names = (*moments, "step", "skipped", *SCALES, COMPENSATION)
    return tuple(name if name in present else None for name in names)


def prepare(state: dict[str, Any], p: Tensor, layers: Layers, storage: Storage, group: Mapping[str, Any]) -> None:
    """Create what is missing of a parameter's state, and convert what is stored in another form."""
    wanted = state_keys(storage)
    if state.keys() >= set(wanted) and not _has_other_precision(state, p, storage):
        return
    if CODES[0] in state or MOMENTS[0] in state:
        _convert(state, p, layers, storage, group)
    for name in wanted:
        if name not in state:
            state[name] = _new(name, p, layers, storage)


def _has_other_precision(state: Mapping[str, Any], p: Tensor, storage: Storage) -> bool:
    """Whether both moments are bf16 instead of float32, or float32 instead of bf16."""
    if storage.state == "fp8":
        return False
    other = {torch.bfloat16: torch.float32, torch.float32: torch.bfloat16}.get(_moment_dtype(p, storage))
    return all(isinstance(state[name], Tensor) and state[name].dtype == other for name in MOMENTS)


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


def _convert(state: dict[str, Any], p: Tensor, layers: Layers, storage: Storage, group: Mapping[str, Any]) -> None:
    """Store the moments in another form, rounded to nearest."""
    if CODES[0] in state:
        state |= _decoded(state)
        _add_eps_share(state, layers, group, 1)
    for name in (*CODES, *SCALES):
        state.pop(name, None)
    if storage.state != "fp8":
        for name in MOMENTS:
            state[name] = state[name].to(_moment_dtype(p, storage))
        return
    _add_eps_share(state, layers, group, -1)
    for name, codes, scales in zip(MOMENTS, CODES, SCALES, strict=True):
        state[codes], state[scales] = _new(codes, p, layers, storage), scales_like(p)
        values = torch.empty_like(local(state[codes]), dtype=torch.float32).copy_(local(state.pop(name)))
        values = values.clamp_(min=0).sqrt_() if name == MOMENTS[1] else values
        encode_(local(state[codes]), local(state[scales]), values)


def _add_eps_share(state: Mapping[str, Any], layers: Layers, group: Mapping[str, Any], sign: int) -> None:
    """Add or subtract what eps has added to the second moment of each layer."""
    variances = layers.views(local(state[MOMENTS[1]]))
    for variance, step in zip(variances, layers.counters(local(state["step"])), strict=True):
        variance.add_(sign * eps_share(group["eps"], group["betas"][1], step).to(variance.dtype))


def restored(
    state: dict[str, Any], p: Tensor, layers: Layers, storage: Storage, group: Mapping[str, Any]
) -> dict[str, Any]:
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
            known[name] = _new(name, p, layers, storage)
            copy_part_(known[name], value)
    if storage.rounding == "kahan":
        known[COMPENSATION] = _new(COMPENSATION, p, layers, storage)
        if compensation is not None:
            copy_part_(known[COMPENSATION], compensation)
    if layers.shape:
        for name in ("step", "skipped"):
            new = counter_like(p, layers.shape, layers.local_shape, layers.dims)
            copy_part_(new, known[name].expand(layers.shape) if known[name].ndim == 0 else known[name])
            known[name] = new
    if codes and not as_codes:
        _add_eps_share(known, layers, group, 1)
    if not as_codes and storage.state != "float32":
        _convert(known, p, layers, storage, group)
    return known


def _can_take(codes: Mapping[str, Tensor], p: Tensor) -> bool:
    """Whether blocks of a checkpoint are blocks of this parameter too: its elements are in the same memory order."""
    saved = codes[CODES[0]]
    if is_dtensor(saved) or is_dtensor(p):
        return is_dtensor(saved) or saved.is_contiguous()
    return saved.stride() == torch.empty_like(p, memory_format=torch.preserve_format).stride()


def _decoded(codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """8-bit moments in float32, placed as the codes are; the second without what eps has added to it."""
    found = {}
    for name, of_codes, of_scales in zip(MOMENTS, CODES, SCALES, strict=True):
        stored = codes[of_codes]
        wide = torch.empty_like(stored, dtype=torch.float32)
        local(wide).copy_(decoded(local(stored), local(codes[of_scales])))
        found[name] = wide
    found[MOMENTS[1]].square_()
    return found


class LayerState(dict[str, Any]):
    """The state of one layer on this rank. 8-bit moments are decoded whenever they are read, and not kept."""

    group: Mapping[str, Any]

    def __missing__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        place = MOMENTS.index(name)
        values = decoded(self[CODES[place]], self[SCALES[place]])
        if not place:
            return values
        return values.square_().add_(
            eps_share(self.group["eps"], self.group["betas"][1], self["step"]).to(values.dtype)
        )

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name in MOMENTS and super().__contains__(CODES[0]))


def layer_states(state: Mapping[str, Any], p: Tensor, layers: Layers, group: Mapping[str, Any]) -> list[LayerState]:
    """The state of each layer of a parameter, for Aida and for any other optimizer: views of its local tensors."""
    found = [LayerState() for _ in layers.numbers]
    for one in found:
        one.group = group
    for name, value in state.items():
        if not isinstance(value, Tensor) and name != "step":
            continue
        if name == "step":
            parts = layers.counters(local(value))
        elif name in SCALES:
            whole = local(state[CODES[0]])
            blocks = local(value).reshape(-1)
            parts = [
                blocks[start // BLOCK : -(-(start + size) // BLOCK)]
                for start, size in places(layers.views(whole), whole)
            ]
        elif value.shape == p.shape:
            parts = layers.views(local(value))
        else:
            continue
        for one, part in zip(found, parts, strict=True):
            one[name] = part
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
