"""How the adaptive stepsizes of an optimizer are read out of its state.

An adaptive stepsize is the factor of ``lr * exp_avg / (1 - beta1**step)``, element by element. For Adam it is
``1 / (sqrt(v / (1 - beta2**t)) + eps)``, as in the paper's footnote. Each optimizer of the catalog, and each of
torch's that a probe supports, has one :class:`Reading`, so that optimizers contain no diagnostic code.
``aida.catalog.reading_for(optimizer)`` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from aida.rule import bias_correction, stepsize_bound

#: One of ``optimizer.param_groups``.
Group = Mapping[str, Any]

#: ``(chunks, step, group) -> stepsizes``; see :class:`Reading`.
Stepsize = Callable[[Sequence[Tensor], Tensor, Group], Tensor]


def decay_in_words(group: Group, effect: str = ", so the adaptive stepsize scales it too") -> str:
    """What the group's weight decay does; ``effect`` says what becomes of decay in the gradient (L2)."""
    decay = group["weight_decay"]
    if not decay:
        return "none"
    if group.get("decoupled_weight_decay", False):
        return f"decoupled: every step shrinks the weights by lr * {decay:g}, whatever the gradient"
    return f"L2: {decay:g} * p is added to the gradient{effect}"


@dataclass(frozen=True)
class Reading:
    """How to read one optimizer's stepsizes from its state.

    Args:
        about (str): what the stepsize is, or why there is none, in one sentence.
        eps (str): where eps is in the update, in words.
        weight_decay (Callable, default: L2 or decoupled): maps a group to what its weight decay does, in words.
        keys (Callable, default: no keys): maps a group to the names of the state tensors that ``stepsize`` needs. All
            have the parameter's shape.
        stepsize (Callable, optional, default: None): maps ``(chunks, step, group)`` to stepsizes, elementwise.
            ``chunks`` holds the same part of each state tensor of ``keys(group)``, real (complex tensors are viewed
            as real pairs), and must not be changed. ``step`` is the parameter's counter after the step, 0-dim and at
            least 1, on the chunks' device or on the host. The function must not synchronize. None if the
            optimizer has no stepsize per element that can be computed from its state.
        bound (Callable, default: no bound): maps a group to an upper bound of its stepsizes, or None.
        eps_inside (bool, default: False): whether eps is part of the second moment. If so, small gradients leave eps
            alone in it: the stepsize reaches its bound, and the update is that of SGD with momentum.
        momentum (str, optional, default: "exp_avg"): the state tensor that ``lr * stepsize / (1 - beta1**step)``
            multiplies in the update. None if the update is another one; it is then not measured.
    """

    about: str
    eps: str
    weight_decay: Callable[[Group], str] = decay_in_words
    keys: Callable[[Group], tuple[str, ...]] = lambda group: ()
    stepsize: Stepsize | None = None
    bound: Callable[[Group], float | None] = lambda group: None
    eps_inside: bool = False
    momentum: str | None = "exp_avg"


def outer_eps(key: str) -> Reading:
    """The reading of Adam and most of its successors. ``key`` names the second moment."""
    return Reading(
        about="1 / (sqrt(v / (1 - beta2**t)) + eps)",
        eps="outside: added to the root of the second moment alone",
        keys=lambda group: (key,),
        stepsize=with_outer_eps,
        bound=lambda group: 1 / group["eps"] if group["eps"] else None,
    )


def inner_eps(key: str) -> Reading:
    """The reading of Aida: v >= eps * (1 - beta2**t) / (1 - beta2), because every step adds eps to it."""
    return Reading(
        about="1 / sqrt(v / (1 - beta2**t))",
        eps="inside: added to the stored variance at every step, and nowhere else",
        keys=lambda group: (key,),
        stepsize=without_outer_eps,
        bound=lambda group: stepsize_bound(float(group["betas"][1]), group["eps"]),
        eps_inside=True,
    )


def both_eps(key: str) -> Reading:
    """The reading of AdaBelief."""
    return replace(
        outer_eps(key),
        eps="inside and outside: added to the stored variance at every step, and to its root",
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
    """Root of the bias-corrected second moment, as a new tensor."""
    return (variance / bias_correction(group["betas"][1], exact(step))).sqrt_()


def exact(step: Tensor) -> Tensor:
    """A step counter in float64, in which bias corrections keep their digits; float32 on Apple's GPUs."""
    return step.float() if step.device.type == "mps" else step.double()
