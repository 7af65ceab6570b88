"""What torch.compile sees of a step: a tensor where a number would become part of the graph."""

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
    """torch's decorator of a step, and around a compiled step every float lr a tensor that holds it.

    torch.compile guards the value of every number in a parameter group, so the first step of a
    scheduler would throw the graph away; a tensor's value is read when the graph runs. Only the plain
    call is helped: with ``fullgraph=True`` there is no place outside the graph, and lr has to be a
    tensor from the start.
    """
    run: Step = _use_grad_for_differentiable(step)

    @wraps(step)  # like torch's: two wrappers, the inner of them the bare step
    def decorated(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _with_tensor_lr(self, run, args, kwargs)
        return run(self, *args, **kwargs)

    return decorated


@_disable_dynamo(recursive=False)  # runs as it is, while the step that it calls is compiled
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
    """Put a tensor in the place of every float lr: the same at every step, or the graph would not know it."""
    tensors: dict[int, Tensor] = optimizer.__dict__.setdefault("_lr_tensors", {})
    lent = []
    for index, group in enumerate(optimizer.param_groups):
        lr = group["lr"]
        if isinstance(lr, Tensor):
            continue
        devices = {p.device for p in group["params"]}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        # float64 only where digits would be lost: AOTAutograd compiles twice when it meets a float64 number
        precise = any(p.dtype in (torch.float64, torch.complex128) for p in group["params"])
        dtype = torch.float64 if precise else torch.float32
        if index not in tensors or (tensors[index].device, tensors[index].dtype) != (device, dtype):
            tensors[index] = torch.zeros((), dtype=dtype, device=device)
        group["lr"] = tensors[index].fill_(lr)
        lent.append((group, lr, tensors[index]))
    return lent
