"""One step down a loss: what every task with a single loss does."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer


def descend(optimizer: Optimizer, loss: Tensor, clip: float | None = None) -> Tensor:
    """Backward, clip the global gradient norm, step; returns the loss, detached. Gradients must be None before."""
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    return loss.detach()
