"""The optimizers that are measured side by side, and what one step of each has to move."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

Groups = list[dict[str, Any]]

#: Bytes a float32 parameter costs at least, in reads and writes of p, g and two moments.
ADAMW_BYTES = 28  # read p, g, m, v; write p, m, v
AIDA_BYTES = 36  # the same, and g and m once more for the inner products
AIDA_L2_BYTES = 40  # L2 decay is part of the gradient, so the inner products need p too
ADAMW_CLIP_BYTES = 40  # clip_grad_norm_ reads g, then reads and writes it

#: The norm all that clip, clip to; the gradients of the benchmark are longer.
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Rival:
    """One row of the table."""

    name: str
    build: Callable[[Groups, bool], Optimizer]  #: (parameter groups, capturable)
    bytes_per_param: int
    path: str | None = None  #: the path of Aida that must have run, or the row would lie
    clip_gradients: bool = False  #: ``clip_grad_norm_`` before every step: the gradients are written to
    graph: bool = True  #: can be captured in a CUDA graph
    changes_lr: bool = False  #: a new learning rate before every step, as warm-up and cosine schedules set
    grouped: bool = False  #: takes part in the comparison of many groups with one
    dtype: torch.dtype = torch.float32  #: of parameters and gradients


def _adamw(**flags: Any) -> Callable[[Groups, bool], Optimizer]:
    def build(groups: Groups, capturable: bool) -> Optimizer:
        return torch.optim.AdamW(groups, capturable=capturable, **flags)

    return build


def _aida(**values: Any) -> Callable[[Groups, bool], Optimizer]:
    def build(groups: Groups, capturable: bool) -> Optimizer:
        from aida import Aida

        return Aida(groups, capturable=capturable, **values)

    return build


def of_library(name: str, **values: Any) -> Callable[..., Optimizer]:
    """``module:Class`` of a library, which is imported when the optimizer is built."""

    def build(groups: Groups, capturable: bool = False) -> Optimizer:
        module, _, kind = name.partition(":")
        optimizer: Optimizer = getattr(importlib.import_module(module), kind)(groups, **values)
        return optimizer

    return build


def _adabelief_pytorch(groups: Groups, capturable: bool) -> Optimizer:
    from adabelief_pytorch import AdaBelief

    with contextlib.redirect_stdout(io.StringIO()):  # its constructor prints what it was given
        optimizer: Optimizer = AdaBelief(groups, print_change_log=False)
    return optimizer


#: The baseline of every ratio.
BASELINE = "AdamW fused"
CLIP_BASELINE = "AdamW fused + clip_grad_norm_"
AIDA_FUSED = "Aida fused"
AIDA_CLIP = "Aida fused, clip_norm"

#: A failed capture can leave the allocator unsettled, so what is likeliest to fail comes last.
RIVALS = (
    Rival(BASELINE, _adamw(fused=True), ADAMW_BYTES, grouped=True),
    Rival("AdamW foreach", _adamw(foreach=True), ADAMW_BYTES, grouped=True),
    Rival(CLIP_BASELINE, _adamw(fused=True), ADAMW_CLIP_BYTES, clip_gradients=True),
    Rival(AIDA_FUSED, _aida(fused=True), AIDA_BYTES, path="fused", grouped=True),
    Rival(AIDA_CLIP, _aida(fused=True, clip_norm=CLIP_NORM), AIDA_BYTES, path="fused"),
    Rival(
        "Aida fused, L2",
        _aida(fused=True, weight_decay=5e-4, decoupled_weight_decay=False),
        AIDA_L2_BYTES,
        path="fused",
    ),
    Rival("Aida fused, new lr every step", _aida(fused=True), AIDA_BYTES, path="fused", changes_lr=True, graph=False),
    Rival("Aida foreach", _aida(foreach=True), AIDA_BYTES, path="foreach", grouped=True),
    Rival("Aida reference", _aida(foreach=False, fused=False), AIDA_BYTES, path="reference"),
    Rival(
        "pytorch_optimizer Aida foreach", of_library("pytorch_optimizer:Aida", foreach=True), AIDA_BYTES, graph=False
    ),
    Rival("pytorch_optimizer Aida loop", of_library("pytorch_optimizer:Aida", foreach=False), AIDA_BYTES, graph=False),
    Rival("adabelief_pytorch AdaBelief", _adabelief_pytorch, ADAMW_BYTES, graph=False),
)

#: Added by --low-precision. p, g and the moments at their sizes: 8-bit state is 1 byte per moment and 1/64 for scales.
LOW_PRECISION_RIVALS = (
    Rival("AdamW fused, bf16 parameters", _adamw(fused=True), 14, dtype=torch.bfloat16),
    Rival("Aida fused, bf16 parameters", _aida(fused=True), 28, path="fused", dtype=torch.bfloat16),
    Rival("Aida fused, bf16 state", _aida(fused=True, state_precision="bfloat16"), 26, path="fused"),
    Rival("Aida fused, fp8 state", _aida(fused=True, state_precision="fp8"), 21, path="fused"),
    Rival(
        "Aida fused, fp8 state, bf16 parameters, stochastic rounding",
        _aida(fused=True, state_precision="fp8", stochastic_rounding=True),
        13,
        path="fused",
        dtype=torch.bfloat16,
    ),
    Rival(
        "Aida fused, fp8 state, bf16 parameters, Kahan sum",
        _aida(fused=True, state_precision="fp8", kahan_sum=True),
        17,
        path="fused",
        dtype=torch.bfloat16,
    ),
    Rival("Aida, state on the CPU (CPUOffload)", of_library("aida:CPUOffload"), AIDA_BYTES, graph=False),
    Rival(
        "optimi AdamW, bf16 parameters, Kahan sum", of_library("optimi:AdamW", kahan_sum=True), 18, dtype=torch.bfloat16
    ),
    Rival(
        "bitsandbytes AdamW8bit, bf16 parameters", of_library("bitsandbytes.optim:AdamW8bit"), 10, dtype=torch.bfloat16
    ),
    Rival(
        "torchao AdamW8bit, bf16 parameters, stochastic rounding",
        of_library("torchao.optim:AdamW8bit", bf16_stochastic_round=True),
        10,
        dtype=torch.bfloat16,
    ),
    Rival(
        "torchao AdamWFp8, bf16 parameters, stochastic rounding",
        of_library("torchao.optim:AdamWFp8", bf16_stochastic_round=True),
        10,
        dtype=torch.bfloat16,
    ),
)
