"""Aida with its state and its steps on the CPU, for parameters on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from aida._step.sharding import is_dtensor
from aida.optimizer import Aida


class CPUOffload(Optimizer):
    """Aida whose state is in the memory of the host, and whose steps run on the CPU.

    A step copies parameters and gradients to the host, updates the parameters there, and copies them back, so the GPU
    holds no state. The result is that of :class:`Aida` on a CPU. Parameter groups, learning rate schedulers,
    ``GradScaler`` and ``clip_norm`` work as there, and each loads the other's checkpoints. Sharded parameters are
    refused.

    Args:
        params (iterable): parameters, named parameters or parameter groups, on any devices
        values (Any): the other arguments of :class:`Aida`, by name
    """

    #: The optimizer of the copies, for :func:`aida.explain` and :class:`aida.StepsizeProbe`.
    host: Aida

    def __init__(self, params: ParamsT, **values: Any) -> None:
        super().__init__(params, Aida([torch.zeros(1)], **values).defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            on_host = {**group, "params": [_host_copy(p) for p in group["params"]]}
            if "host" in self.__dict__:
                self.host.add_param_group(on_host)
            else:
                self.host = Aida([on_host])  # the group has all values
        except (ValueError, TypeError, RuntimeError):
            self.param_groups.pop()  # a refused group leaves the optimizer unchanged
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure (Callable, optional, default: None): evaluates the model and returns the loss, which is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, on_host in zip(self.param_groups, self.host.param_groups, strict=True):
            on_host.update({**mine, "params": on_host["params"]})
        moved = [(p, p.grad, copy) for p, copy in self._pairs() if p.grad is not None]
        with torch.no_grad():
            for p, grad, copy in moved:
                copy.copy_(p, non_blocking=p.is_cuda)  # also what others wrote to it since the last step
                copy.grad = _empty_on_host(grad).copy_(grad, non_blocking=p.is_cuda)
            for device in {p.device for p, _, _ in moved if p.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
            try:
                self.host.step()
            finally:
                self.host.zero_grad()
            for p, _, copy in moved:
                p.copy_(copy, non_blocking=p.is_cuda)
        self._share_state()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class or of :class:`Aida`.

        Args:
            state_dict (dict): what ``state_dict()`` returned.
        """
        self.host.load_state_dict(state_dict)
        for mine, on_host in zip(self.param_groups, self.host.param_groups, strict=True):
            mine.update({**on_host, "params": mine["params"]})
        self._share_state()

    def skipped(self) -> Counter[str]:
        """The number of steps that each tensor skipped, as :meth:`Aida.skipped`."""
        return self.host.skipped()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "host": self.host}

    def _share_state(self) -> None:
        """Let ``state_dict()`` and others find the state under the parameters, too."""
        for p, copy in self._pairs():
            if copy in self.host.state:
                self.state[p] = self.host.state[copy]

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for mine, on_host in zip(self.param_groups, self.host.param_groups, strict=True):
            yield from zip(mine["params"], on_host["params"], strict=True)


def _host_copy(p: Tensor) -> Parameter:
    if is_dtensor(p):
        raise TypeError(
            "CPUOffload takes plain tensors, not sharded parameters; FSDP2 has an offload of its own, the "
            "offload_policy of fully_shard"
        )
    # a parameter that gets no gradient, such as a frozen one, should not take memory that is pinned
    return Parameter(_empty_on_host(p) if p.requires_grad else torch.empty_like(p, device="cpu"), p.requires_grad)


def _empty_on_host(tensor: Tensor) -> Tensor:
    """Memory like that of a tensor. Pinned if the tensor is on a GPU: copies are then asynchronous, and faster."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
