"""Short trainings for the tests of the fused CPU path: parameters, gradients, and how two runs compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from aida import Aida

STEPS = 50
REFERENCE = {"foreach": False, "fused": False}
#: Below, at and beyond a chunk of the kernel, below a vector register, and nothing at all.
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (5,), (0, 3), (33, 7), (4096,), (4097,), (6, 5, 3, 2), (101, 203))
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-10}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "l2": {"weight_decay": 0.1, "decoupled_weight_decay": False},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "ascent": {"maximize": True, "weight_decay": 0.1, "decoupled_weight_decay": False},
    "clip": {"clip_norm": 0.3},
    "clip-l2": {"clip_norm": 0.3, "weight_decay": 0.1, "decoupled_weight_decay": False},
    "no-momentum": {"betas": (0.0, 0.99), "eps": 1e-4},  # m is g: nothing is left but eps
}

Gradient = Callable[[int, int, Tensor], Tensor | None]  #: of step, index and parameter


def parameters(dtype: torch.dtype = torch.float64, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Parameter]:
    rng = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        values = torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
        if len(shape) == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        params.append(Parameter(values))
    return params


def gradient(step: int, index: int, p: Tensor) -> Tensor:
    """Noise around a direction of its own for each tensor, so that m and g are neither equal nor orthogonal."""
    rng = torch.Generator().manual_seed(1000 * index + step)
    noise = torch.randn(p.shape, generator=rng, dtype=torch.float64)
    return torch.empty_like(p).copy_(0.01 * (noise + torch.linspace(-1, 1, p.numel()).reshape(p.shape)))


def run(optimizer: Aida, steps: int = STEPS, grads: Gradient = gradient) -> Aida:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for index, p in enumerate(params):
            p.grad = grads(step, index, p.detach())
        optimizer.step()
    return optimizer


def tensors(optimizer: Aida) -> dict[str, list[Tensor]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    known = [optimizer.state[p] for p in params if optimizer.state[p]]
    return {"param": [p.detach() for p in params], **{name: [s[name] for s in known] for name in known[0]}}


def error(found: Tensor, wanted: Tensor) -> float:
    norm = float(wanted.double().norm())
    return float((found.double() - wanted.double()).norm()) / norm if norm else float(found.double().norm())


def assert_close(found: Aida, wanted: Aida, tolerance: float) -> None:
    for name, values in tensors(wanted).items():
        for index, (mine, judge) in enumerate(zip(tensors(found)[name], values, strict=True)):
            assert error(mine, judge) <= tolerance, f"{name} {index} of shape {tuple(judge.shape)}"


def assert_identical(found: Aida, wanted: Aida) -> None:
    for name, values in tensors(wanted).items():
        for index, (mine, judge) in enumerate(zip(tensors(found)[name], values, strict=True)):
            assert torch.equal(mine, judge), f"{name} {index} of shape {tuple(judge.shape)}"
