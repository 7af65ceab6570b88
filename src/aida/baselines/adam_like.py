"""What the methods that divide a first moment by the root of a second moment share with Adam."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from aida.baselines.contract import Baseline, counted, learning_rate, per_tensor
from aida.readings import Group


class AdamLike(Baseline):
    """The base class of methods with Adam's arguments.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate; a one-element tensor, with ``capturable=True``, to change it in a CUDA graph.
        betas: decay rates of the first and second moment.
        eps: keeps the adaptive stepsize finite; its place in the update depends on the method.
        weight_decay: L2, or decoupled as in AdamW with ``decoupled_weight_decay=True``.
        maximize: ascend instead of descend.
        foreach: False updates one tensor at a time; True and None update lists of tensors.
        capturable: keep the step counter on the device, so that a CUDA graph can capture the step.
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


def update_moments(
    exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], grads: list[Tensor], beta1: float, beta2: float
) -> None:
    """``m = beta1 * m + (1 - beta1) * g`` and ``v = beta2 * v + (1 - beta2) * g**2``."""
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)


def descend(
    params: list[Tensor], exp_avgs: list[Tensor], variances: list[Tensor], steps: list[Tensor], group: Group
) -> None:
    """``param -= lr * m_hat / (sqrt(v_hat) + eps)``."""
    beta1, beta2 = group["betas"]
    t, dtype = counted(steps), params[0].dtype
    work = torch._foreach_sqrt(variances)
    torch._foreach_div_(work, per_tensor((1 - beta2**t).sqrt(), dtype))
    torch._foreach_add_(work, group["eps"])
    torch._foreach_reciprocal_(work)
    torch._foreach_mul_(work, exp_avgs)
    torch._foreach_mul_(work, per_tensor(learning_rate(group) / (1 - beta1**t), dtype))
    torch._foreach_sub_(params, work)
