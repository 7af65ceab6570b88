"""Fromage: a step as long as the weights themselves are, times lr, for each tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from aida.baselines.contract import Baseline, learning_rate, per_tensor
from aida.catalog import Entry, Paper
from aida.readings import Group, Reading


class Fromage(Baseline):
    """Gradient descent whose step is relative to the norm of each tensor; no state, no weight decay.

    With gradient ``g``, and plain ``g`` where one of the norms is 0::

        p = (p - lr * |p| / |g| * g) / sqrt(1 + lr**2)

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate, the length of a step relative to the weights.
        maximize: ascend instead of descend.
        foreach: True updates lists of tensors, False one tensor at a time, None picks by the device.
        capturable: allow capture in a CUDA graph.
    """

    counters = ()
    layerwise = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "maximize": maximize, "foreach": foreach, "capturable": capturable})

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group) -> None:
        length = _lengths(param.norm(), grad.norm(), group)

        # parameters
        param.sub_(grad * length).div_(_growth(group))

    def update_foreach(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], group: Group
    ) -> None:
        norms, grad_norms = torch._foreach_norm(params), torch._foreach_norm(grads)
        lengths = _lengths(torch.stack(list(norms)), torch.stack(list(grad_norms)), group)

        # parameters
        work = torch._foreach_mul(grads, lengths)
        torch._foreach_sub_(params, work)
        torch._foreach_div_(params, _growth(group))


def _lengths(norm: Tensor, grad_norm: Tensor, group: Group) -> Any:
    """What the gradient of each tensor is multiplied with: ``lr * |p| / |g|``, or lr where one is 0."""
    relative = torch.where((norm > 0) & (grad_norm > 0), norm / grad_norm, torch.ones_like(norm))
    return per_tensor(learning_rate(group) * relative, norm.dtype)


def _growth(group: Group) -> Any:
    """``sqrt(1 + lr**2)``: what the weights would grow by in one step, were the gradient at a right angle."""
    return (1 + learning_rate(group) ** 2) ** 0.5


ENTRIES = [
    Entry(
        name="fromage",
        title="Fromage",
        optimizer=Fromage,
        paper=Paper(
            "J. Bernstein, A. Vahdat, Y. Yue, M.-Y. Liu",
            "On the distance between two neural networks and the stability of learning",
            2020,
            "2002.03432",
        ),
        rule="p = (p - lr |p|/|g| g) / sqrt(1 + lr^2), norms of each tensor",
        defaults={"lr": 1e-2},
        reading=Reading(
            about=(
                "none per element: one scale |p|/|g| a tensor, made anew from the gradient at every step and not "
                "kept in the state"
            ),
            eps="none",
            weight_decay=lambda group: "none: dividing by sqrt(1 + lr**2) keeps the weights from growing",
        ),
        notes="A layer is a parameter tensor, biases included, as in the authors' code.",
    ),
]
