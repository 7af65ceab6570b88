"""How the adaptive stepsizes of an optimizer are read out of its state.

An adaptive stepsize is what ``lr * exp_avg / (1 - beta1**step)`` is multiplied with, element by
element; for Adam that is the ``1 / (sqrt(v / (1 - beta2**t)) + eps)`` of the paper's footnote. Each
optimizer of the catalog, and each of torch's that a probe knows, has one :class:`Reading`; optimizers
themselves hold no diagnostic code. ``aida.catalog.reading_for(optimizer)`` finds the right one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aida.rule import bias_correction, stepsize_bound

#: One of ``optimizer.param_groups``.
Group = Mapping[str, Any]

#: ``(chunks, step, group)`` to the stepsizes of the chunk; see :class:`Reading`.
Stepsize = Callable[[Sequence[Tensor], Tensor, Group], Tensor]


@dataclass(frozen=True)
class Reading:
    """What one optimizer's state says about its stepsizes."""

    #: What the stepsize is, or why there is none, in one sentence.
    about: str
    #: Where eps sits in the update, in words.
    eps: str
    #: What weight decay means for a group, in words.
    weight_decay: Callable[[Group], str]
    #: The state tensors the stepsize is computed from, all of the parameter's shape.
    keys: Callable[[Group], tuple[str, ...]] = lambda group: ()
    #: Elementwise: ``chunks`` are the same stretch of each state tensor of ``keys(group)``, real (a
    #: complex state viewed as real pairs) and left unchanged; ``step`` is the parameter's counter after
    #: the step, 0-dim and at least 1, on the chunks' device or on the host. Waits for no device.
    #: None where the optimizer has no stepsize per element that its state could tell.
    stepsize: Stepsize | None = None
    #: What no stepsize of the group can exceed; None where nothing finite is known.
    bound: Callable[[Group], float | None] = lambda group: None
    #: Whether eps enters the second moment: where gradients are small it alone fills it, the stepsize is at its
    #: bound, and the update is that of SGD with momentum.
    eps_inside: bool = False


def outer_eps(key: str) -> Reading:
    """Adam's, and that of most that came after it: the second moment is the state tensor ``key``."""
    return Reading(
        about="1 / (sqrt(v / (1 - beta2**t)) + eps)",
        eps="outside: added to the root of the second moment alone",
        weight_decay=decay_in_words,
        keys=lambda group: (key,),
        stepsize=with_outer_eps,
        bound=lambda group: 1 / group["eps"] if group["eps"] else None,
    )


def inner_eps(key: str) -> Reading:
    """Aida's: v >= eps * (1 - beta2**t) / (1 - beta2), because eps enters it at every step."""
    return Reading(
        about="1 / sqrt(v / (1 - beta2**t))",
        eps="inside: added to the stored variance at every step, and nowhere else",
        weight_decay=decay_in_words,
        keys=lambda group: (key,),
        stepsize=without_outer_eps,
        bound=lambda group: stepsize_bound(float(group["betas"][1]), group["eps"]),
        eps_inside=True,
    )


def both_eps(key: str) -> Reading:
    """AdaBelief's."""
    return Reading(
        about="1 / (sqrt(v / (1 - beta2**t)) + eps)",
        eps="inside and outside: added to the stored variance at every step, and to its root",
        weight_decay=decay_in_words,
        keys=lambda group: (key,),
        stepsize=with_outer_eps,
        bound=lambda group: 1 / (math.sqrt(group["eps"] / (1 - float(group["betas"][1]))) + group["eps"]),
        eps_inside=True,
    )


def with_outer_eps(chunks: Sequence[Tensor], step: Tensor, group: Group) -> Tensor:
    """``1 / (sqrt(v / (1 - beta2**t)) + eps)``."""
    return corrected_root(chunks[0], step, group).add_(group["eps"]).reciprocal_()


def without_outer_eps(chunks: Sequence[Tensor], step: Tensor, group: Group) -> Tensor:
    """``1 / sqrt(v / (1 - beta2**t))``."""
    return corrected_root(chunks[0], step, group).reciprocal_()


def corrected_root(variance: Tensor, step: Tensor, group: Group) -> Tensor:
    """Root of the bias-corrected second moment, in memory of its own."""
    return (variance / bias_correction(group["betas"][1], exact(step))).sqrt_()


def exact(step: Tensor) -> Tensor:
    """A step counter in float64, where bias corrections keep their digits; Apple's GPUs have none."""
    return step.float() if step.device.type == "mps" else step.double()


def decay_in_words(group: Group) -> str:
    """What the group's weight decay does, for methods that scale each element of the gradient."""
    decay = group["weight_decay"]
    if not decay:
        return "none"
    if group.get("decoupled_weight_decay", False):
        return f"decoupled: every step shrinks the weights by lr * {decay:g}, whatever the gradient"
    return f"L2: {decay:g} * p is added to the gradient, so the adaptive stepsize scales it too"
