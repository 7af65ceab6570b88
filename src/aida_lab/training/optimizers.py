"""Build the optimizers of a run from its spec, and set their learning rate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aida.baselines.contract import Baseline
from aida.catalog import find
from aida_lab.experiments import find_experiment
from aida_lab.external import REST, import_optimizer, pair
from aida_lab.spec import RunSpec


def can_be_captured(spec: RunSpec) -> bool:
    """Whether a CUDA graph can capture its step: its counters and its lr are on the device."""
    return all(_capturable(_class(name)) for name in pair(spec.optimizer) if name)


def build(spec: RunSpec, module: nn.Module, device: torch.device, *, sharded: bool = False) -> Optimizer:
    """The optimizer of a spec for a module; ``sharded`` says that its parameters are DTensors.

    On a GPU it is capturable if possible, so that an eager step and a captured one give the same bits.
    """
    # JSON has no tuples, and betas must be one
    hyper = {name: tuple(value) if isinstance(value, list) else value for name, value in spec.hyper.items()}
    first, rest = pair(spec.optimizer)
    if not rest:
        return _build(spec, first, list(module.parameters()), hyper, device, sharded)
    if sharded:
        raise ValueError(f"{spec.optimizer} is made for whole matrices, and --shard splits them; leave --shard out")
    matrices, others = split(module)
    if not matrices or not others:
        raise ValueError(f"{spec.optimizer}: the model has no {'other parameters' if matrices else 'hidden matrices'}")
    own = {name: value for name, value in hyper.items() if not name.startswith(REST)}
    shared = {"lr": own["lr"]} if "lr" in own else {}
    of_rest = {name.removeprefix(REST): value for name, value in hyper.items() if name.startswith(REST)}
    return MatricesAndRest(
        _build(spec, first, matrices, own, device), _build(spec, rest, others, {**of_rest, **shared}, device)
    )


def _build(
    spec: RunSpec, name: str, params: list[Tensor], hyper: dict[str, Any], device: torch.device, sharded: bool = False
) -> Optimizer:
    kind = _class(name)
    accepted = _arguments(kind)
    if device.type == "cuda" and kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        hyper.setdefault("fused", True)  # torch's fastest path; the optimizers of the catalog choose their own
    if device.type == "cuda" and _capturable(kind):
        if "capturable" in accepted:
            hyper["capturable"] = True
        lr = hyper.get("lr", accepted["lr"].default if "lr" in accepted else None)
        hyper["lr"] = torch.tensor(lr, dtype=torch.float32, device=device)
    groups: list[Any] = params
    vectors = [p for p in params if p.ndim < 2]
    if hyper.get("weight_decay") and vectors and find_experiment(spec.experiment).decays_matrices_only:
        groups = [{"params": [p for p in params if p.ndim >= 2]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: Optimizer = kind(groups, **hyper)
    if spec.compiled and device.type == "cuda" and issubclass(kind, Baseline) and not sharded:
        # A dozen passes over memory become one; the other optimizers have their own kernels. A step has no loops to
        # reorder, and torch 2.11 fails to reorder them if tensors are updated together.
        optimizer.step = torch.compile(  # type: ignore[assignment, method-assign]
            optimizer.step, dynamic=False, options={"loop_ordering_after_fusion": False}
        )
    return optimizer


def split(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The hidden matrices of a module, and the rest: embeddings, the last linear layer, all that is not a matrix.

    This is how Muon is used.
    """
    ends = [each.weight for each in module.modules() if isinstance(each, nn.Embedding)]
    ends += [each.weight for each in module.modules() if isinstance(each, nn.Linear)][-1:]
    outside = {id(p) for p in ends}
    matrices: list[Tensor] = [p for p in module.parameters() if p.ndim == 2 and id(p) not in outside]
    inside = {id(p) for p in matrices}
    return matrices, [p for p in module.parameters() if id(p) not in inside]


class MatricesAndRest(Optimizer):
    """Two optimizers as one: one for the hidden matrices of a model, such as torch's Muon, and one for the rest.

    Both have the same learning rate.
    """

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})
        self.parts = parts
        self._join()

    def _join(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._join()  # loading replaces the groups of each part


def has_modes(optimizer: Optimizer) -> bool:
    """Whether it trains and evaluates different weights, as Schedule-Free does: it has ``train()`` and ``eval()``."""
    return any(hasattr(part, "train") and hasattr(part, "eval") for part in _parts(optimizer))


def set_mode(optimizers: Iterable[Optimizer], mode: Literal["train", "eval"]) -> None:
    """Call ``train()`` or ``eval()`` of every optimizer that :func:`has_modes`."""
    for part in (part for optimizer in optimizers for part in _parts(optimizer)):
        if has_modes(part):
            getattr(part, mode)()


def _parts(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    return optimizer.parts if isinstance(optimizer, MatricesAndRest) else (optimizer,)


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


def _class(name: str) -> type[Any]:
    return import_optimizer(name) if ":" in name else find(name).optimizer


def _capturable(kind: type[Any]) -> bool:
    # torch's SGD has no counters, and its fused form reads lr on the device
    return "capturable" in _arguments(kind) or kind is torch.optim.SGD
