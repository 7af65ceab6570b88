"""Defaults and helpers that the tasks share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class BaseTask:
    """A task without extra state and without a factor on the learning rate; see :class:`aida_lab.task.Task`."""

    def lr_factor(self, index: int) -> float:
        return 1.0

    def extra_state(self) -> dict[str, Any]:
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        pass


def backward_and_step(optimizer: Optimizer, loss: Tensor, clip: float | None = None) -> Tensor:
    """Backward, clip the global gradient norm, step. Returns the detached loss. Gradients must be None before."""
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    return loss.detach()


def perplexity(loss: float) -> float:
    """exp(loss) for a mean cross entropy in nats. The loss is capped at 100, so that the result stays finite."""
    return math.exp(min(loss, 100.0))
