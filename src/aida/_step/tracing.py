"""A compiled step with lr as a tensor, so that a new lr does not recompile it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

Step = Callable[..., Any]


def without_gradients(step: Step) -> Step:
    """torch's decorator of ``step``, which in addition replaces every float lr by a tensor while the step is compiled.

    torch.compile guards the value of every number in a parameter group, so the first step of a scheduler would
    recompile the graph. The value of a tensor is read when the graph runs. This does not help with
    ``fullgraph=True``, where no code runs outside the graph: pass lr as a tensor there.
    """
    run: Step = _use_grad_for_differentiable(step)

    @wraps(step)  # as in torch, the bare step is found through two wrappers
    def decorated(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _with_tensor_lr(self, run, args, kwargs)
        return run(self, *args, **kwargs)

    return decorated


@_disable_dynamo(recursive=False)  # not compiled itself, unlike the step that it calls
def _with_tensor_lr(optimizer: Optimizer, run: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lent = _lend(optimizer)
    try:
        return run(optimizer, *args, **kwargs)
    finally:
        for group, lr, tensor in lent:
            if group["lr"] is tensor:  # a closure may have changed it
                group["lr"] = lr


@_disable_dynamo
def _lend(optimizer: Optimizer) -> list[tuple[dict[str, Any], float, Tensor]]:
    """Replace every float lr by a tensor, the same one at every step, because the graph is bound to it."""
    tensors: dict[int, Tensor] = optimizer.__dict__.setdefault("_lr_tensors", {})
    lent = []
    for index, group in enumerate(optimizer.param_groups):
        lr = group["lr"]
        if isinstance(lr, Tensor):
            continue
        devices = {p.device for p in group["params"]}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        # float64 only if float32 would lose digits, because AOTAutograd compiles twice for a float64 number
        precise = any(p.dtype in (torch.float64, torch.complex128) for p in group["params"])
        dtype = torch.float64 if precise else torch.float32
        if index not in tensors or (tensors[index].device, tensors[index].dtype) != (device, dtype):
            tensors[index] = torch.zeros((), dtype=dtype, device=device)
        group["lr"] = tensors[index].fill_(lr)
        lent.append((group, lr, tensors[index]))
    return lent
