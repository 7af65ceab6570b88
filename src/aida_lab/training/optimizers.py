"""Build the optimizers of a run from its spec, and set their learning rate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from aida.baselines.contract import Baseline
from aida.catalog import find
from aida_lab.experiments import find_experiment
from aida_lab.external import import_optimizer
from aida_lab.spec import RunSpec


def optimizer_class(spec: RunSpec) -> type[Optimizer]:
    """The class a spec names."""
    return import_optimizer(spec.optimizer) if ":" in spec.optimizer else find(spec.optimizer).optimizer


def can_be_captured(spec: RunSpec) -> bool:
    """Whether a CUDA graph can capture its step: its counters and its lr are on the device."""
    kind = optimizer_class(spec)
    # torch's SGD has no counters, and its fused form reads lr on the device
    return "capturable" in _arguments(kind) or kind is torch.optim.SGD


def build(spec: RunSpec, params: Iterable[Tensor], device: torch.device, *, sharded: bool = False) -> Optimizer:
    """The optimizer of a spec; ``sharded`` says that the parameters are DTensors.

    On a GPU it is capturable if possible, so that an eager step and a captured one give the same bits.
    """
    kind = optimizer_class(spec)
    accepted = _arguments(kind)
    # JSON has no tuples, and betas must be one
    hyper = {name: tuple(value) if isinstance(value, list) else value for name, value in spec.hyper.items()}
    if device.type == "cuda" and kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        hyper.setdefault("fused", True)  # torch's fastest path; the optimizers of the catalog choose their own
    if device.type == "cuda" and can_be_captured(spec):
        if "capturable" in accepted:
            hyper["capturable"] = True
        lr = hyper.get("lr", accepted["lr"].default if "lr" in accepted else None)
        hyper["lr"] = torch.tensor(lr, dtype=torch.float32, device=device)
    matrices_only = kind is getattr(torch.optim, "Muon", None)
    make: Callable[..., Optimizer] = partial(MatricesAndRest, kind) if matrices_only else kind
    if matrices_only and sharded:
        raise ValueError(f"{spec.optimizer} updates whole matrices, and --shard splits them; leave --shard out")
    if hyper.get("weight_decay") and not matrices_only and find_experiment(spec.experiment).decays_matrices_only:
        params = list(params)
        matrices, rest = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
        optimizer = make([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], **hyper)
    else:
        optimizer = make(params, **hyper)
    if spec.compiled and device.type == "cuda" and issubclass(kind, Baseline) and not sharded:
        # A dozen passes over memory become one; the other optimizers have their own kernels. A step has no loops to
        # reorder, and torch 2.11 fails to reorder them if tensors are updated together.
        optimizer.step = torch.compile(  # type: ignore[assignment, method-assign]
            optimizer.step, dynamic=False, options={"loop_ordering_after_fusion": False}
        )
    return optimizer


class MatricesAndRest(Optimizer):
    """An optimizer for matrices only, such as torch's Muon, with AdamW for all other parameters, as one optimizer.

    This is how Muon is used: it updates matrices, and AdamW updates biases, norms and convolutions. Both have the same
    learning rate: Muon's steps are scaled to the size of AdamW's unless ``adjust_lr_fn`` is set.
    """

    def __init__(self, kind: Callable[..., Optimizer], params: Iterable[Tensor], **hyper: Any) -> None:
        params = list(params)
        matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        if not matrices:
            raise ValueError("this optimizer updates matrices only, and none of the parameters is one; choose another")
        super().__init__(params, {})
        first = kind(matrices, **{"adjust_lr_fn": "match_rms_adamw", **hyper})
        group = first.param_groups[0]
        self._parts = [first]
        if rest:
            self._parts.append(AdamW(rest, lr=group["lr"], weight_decay=group["weight_decay"]))
        self._join()

    def _join(self) -> None:
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._join()  # loading replaces the groups of each part


class LearningRate:
    """Sets the learning rate of all groups: in place if a CUDA graph reads it, else as a number."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        first = self._optimizers[0].param_groups[0]["lr"]
        self._tensor = first if isinstance(first, Tensor) else None
        self.base = float(first)
        self.attach()

    def attach(self) -> None:
        """Put the lr tensor into all groups; again after a checkpoint replaced it."""
        self._value: float | None = None
        if self._tensor is not None:
            self._put(self._tensor)

    def set(self, value: float) -> None:
        if value != self._value:
            self._value = value
            if self._tensor is not None:
                self._tensor.fill_(value)
            else:
                self._put(value)

    def _put(self, lr: Tensor | float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr


def _arguments(kind: type[Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind).parameters
