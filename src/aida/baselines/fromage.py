"""Fromage: the length of the step of each tensor is lr times the norm of the tensor."""

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

    With gradient ``g``; if one of the norms is 0, ``|p| / |g|`` is replaced by 1::

        p = (p - lr * |p| / |g| * g) / sqrt(1 + lr**2)

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate, the length of a step relative to the weights.
        maximize: ascend instead of descend.
        foreach: False updates one tensor at a time; True and None update lists of tensors.
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

    def update(self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], group: Group) -> None:
        norms, grad_norms = torch._foreach_norm(params), torch._foreach_norm(grads)
        lengths = _lengths(torch.stack(list(norms)), torch.stack(list(grad_norms)), group)

        # parameters
        work = torch._foreach_mul(grads, lengths)
        torch._foreach_sub_(params, work)
        torch._foreach_div_(params, _growth(group))


def _lengths(norm: Tensor, grad_norm: Tensor, group: Group) -> list[Any]:
    """Return the factor of the gradient of each tensor: ``lr * |p| / |g|``, or lr if one norm is 0."""
    relative = torch.where((norm > 0) & (grad_norm > 0), norm / grad_norm, torch.ones_like(norm))
    return per_tensor(learning_rate(group) * relative, norm.dtype)


def _growth(group: Group) -> Any:
    """``sqrt(1 + lr**2)``: the growth of the weights in a step at a right angle to them."""
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
                "none per element: one scale |p|/|g| per tensor, computed from the gradient at every step and not "
                "stored"
            ),
            eps="none",
            weight_decay=lambda group: "none: dividing by sqrt(1 + lr**2) keeps the weights from growing",
        ),
        notes="A layer is a parameter tensor, biases included, as in the authors' code.",
    ),
]
