"""Fromage: the length of the step of each tensor is lr times the norm of the tensor."""

from __future__ import annotations

from typing import ClassVar

import torch

from aida.baselines.contract import Baseline, Bucket
from aida.catalog import Entry, Paper
from aida.readings import Reading


class Fromage(Baseline):
    """Gradient descent whose step is relative to the norm of each tensor; no state, no weight decay.

    With gradient ``g``; if one of the norms is 0, ``|p| / |g|`` is replaced by 1::

        p = (p - lr * |p| / |g| * g) / sqrt(1 + lr**2)

    Args:
        lr: learning rate, the length of a step relative to the weights.
        others: as for :class:`Baseline`; there are no betas, eps and weight_decay.
    """

    hyper: ClassVar = {"lr": 1e-2}
    options: ClassVar = {}
    moments = ()
    counters = ()
    layerwise = True

    def update(self, bucket: Bucket) -> None:
        params, grads, lr = bucket.params, bucket.grads, bucket.lr
        norms, grad_norms = (torch.stack(list(torch._foreach_norm(tensors))) for tensors in (params, grads))
        relative = torch.where((norms > 0) & (grad_norms > 0), norms / grad_norms, torch.ones_like(norms))

        # parameters
        torch._foreach_sub_(params, torch._foreach_mul(grads, bucket.each(lr * relative)))
        torch._foreach_div_(params, (1 + lr**2) ** 0.5)  # a step at a right angle to the weights lets them grow by this


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
        defaults=Fromage.hyper,
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
