"""What the methods that divide a first moment by the root of a second share with Adam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from aida.baselines.contract import Baseline, counted, learning_rate, per_tensor
from aida.readings import Group


class AdamLike(Baseline):
    """Adam's arguments, its bias corrections and its last phase; a subclass says what its variance is.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate; a one-element tensor, with ``capturable=True``, to change it in a CUDA graph.
        betas: decay rates of the first and second moment.
        eps: keeps the adaptive stepsize finite; where it sits is the method's own.
        weight_decay: L2, or decoupled as in AdamW with ``decoupled_weight_decay=True``.
        maximize: ascend instead of descend.
        foreach: True updates lists of tensors, False one tensor at a time, None picks by the device.
        capturable: keep the step counter on the device, so that a CUDA graph can hold the step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
        }
        super().__init__(params, defaults)


def corrections(step: Tensor | list[Tensor], group: Group, dtype: torch.dtype) -> tuple[Any, Any]:
    """``lr / (1 - beta1**t)`` and ``sqrt(1 - beta2**t)``, one of each a tensor."""
    beta1, beta2 = group["betas"]
    t = counted(step)
    return per_tensor(learning_rate(group) / (1 - beta1**t), dtype), per_tensor((1 - beta2**t).sqrt(), dtype)


def descend(param: Tensor, exp_avg: Tensor, variance: Tensor, step: Tensor, group: Group) -> None:
    """``param -= lr * m_hat / (sqrt(v_hat) + eps)``."""
    stepsize, root_correction = corrections(step, group, param.dtype)
    denominator = variance.sqrt().div_(root_correction).add_(group["eps"])
    param.sub_(denominator.reciprocal_().mul_(exp_avg).mul_(stepsize))


def descend_foreach(
    params: list[Tensor], exp_avgs: list[Tensor], variances: list[Tensor], steps: list[Tensor], group: Group
) -> None:
    """The same for lists."""
    stepsizes, root_corrections = corrections(steps, group, params[0].dtype)
    work = torch._foreach_sqrt(variances)
    torch._foreach_div_(work, root_corrections)
    torch._foreach_add_(work, group["eps"])
    torch._foreach_reciprocal_(work)
    torch._foreach_mul_(work, exp_avgs)
    torch._foreach_mul_(work, stepsizes)
    torch._foreach_sub_(params, work)
