"""A tiny model, its data, and the loop that a user writes by hand: what every library has to agree with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

LR = 1e-2
STEPS = 4


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def train(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    decay: float = 0.0,
) -> list[Tensor]:
    """Train by hand and return the weights; ``decay`` shrinks matrices before each step, as AdamW does."""
    x, y = data()
    x, y = (t.to(next(model.parameters()).dtype) for t in (x, y))
    scaler = torch.amp.GradScaler("cpu", enabled=autocast is torch.float16)
    for _ in range(STEPS):
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            loss = mse_loss(model(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if decay:
            with torch.no_grad():
                for p in model.parameters():
                    if p.ndim > 1:
                        p.mul_(1 - LR * decay)
        for optimizer in optimizers:
            if clip is not None:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
        scaler.update()
    return weights(model)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def gap(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference between two models."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(some, others, strict=True))
