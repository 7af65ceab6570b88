"""Aida as torch's own optimizer tests want to know it: an OptimizerInfo, with good and bad inputs as data."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, OneCycleLR, PolynomialLR, ReduceLROnPlateau, StepLR
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

from aida import Aida
from aida.backends.choice import fused_available

Kwargs = dict[str, Any]


def device_type(device: str | torch.device) -> str:
    return torch.device(device).type


IMPLEMENTATIONS: dict[str, Kwargs] = {
    "forloop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def has_fused(device: str | torch.device) -> bool:
    """Without a C compiler, or without Triton, a device has no fused path to test."""
    return fused_available(device_type(device))


def flags_or_skip(implementation: str, device: str) -> Kwargs:
    if implementation == "fused" and not has_fused(device):
        pytest.skip(f"no fused path on {device} here")
    return IMPLEMENTATIONS[implementation]


def inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    """Arguments worth a test each, without the flags that choose a path: the tests add those."""
    anywhere: dict[str, Kwargs] = {
        "default": {},
        "lr": {"lr": 0.01},
        "L2 decay": {"weight_decay": 0.1},
        "decoupled decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
        "maximize": {"weight_decay": 0.1, "maximize": True},
        "no projections": {"projections": 0},
        "odd projections": {"projections": 3, "weight_decay": 0.1},
        "betas, eps, xi": {"betas": (0.8, 0.95), "eps": 1e-6, "xi": 1e-12},
        "clipped": {"clip_norm": 0.5, "weight_decay": 0.1},
        "propagate": {"nonfinite": "propagate"},
    }
    # a tensor lr under foreach=True needs capturable, and capture exists on accelerators alone
    on_cuda: dict[str, Kwargs] = {
        "capturable": {"capturable": True},
        "capturable, decay": {"capturable": True, "weight_decay": 0.1, "clip_norm": 0.5},
        "capturable, tensor lr": {"capturable": True, "lr": torch.tensor(0.001)},
        "capturable, tensor lr, tensor betas": {
            "capturable": True,
            "lr": torch.tensor(0.001),
            "betas": (torch.tensor([[[0.9]]]), torch.tensor([[0.99]])),
        },
    }
    chosen = {**anywhere, **(on_cuda if device_type(device) == "cuda" else {})}
    return [OptimizerInput(params=None, kwargs=kwargs, desc=name) for name, kwargs in chosen.items()]


def error_inputs(device: str, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    """What AdamW refuses, by the same class and words, and what only Aida can refuse."""
    if device_type(device) != "cpu":
        return []
    tensor = torch.tensor
    values: list[tuple[Kwargs, type[Exception], str]] = [
        ({"lr": -1e-3}, ValueError, "Invalid learning rate: -0.001"),
        ({"eps": -1e-8}, ValueError, "Invalid epsilon value: -1e-08"),
        ({"betas": (1.0, 0.0)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.0, 1.0)}, ValueError, "Invalid beta parameter at index 1: 1.0"),
        ({"weight_decay": -1}, ValueError, "Invalid weight_decay value: -1"),
        ({"lr": tensor(1e-3), "foreach": True}, ValueError, "lr as a Tensor is not supported for capturable=False"),
        ({"betas": (0.9, tensor(0.99))}, ValueError, "betas must be either both floats or both Tensors"),
        ({"betas": (tensor(0.9), 0.99)}, ValueError, "betas must be either both floats or both Tensors"),
        ({"betas": (tensor(0.9), tensor([0.9, 0.9]))}, ValueError, r"Tensor betas\[1\] must be 1-element"),
        (
            {"betas": (tensor(0.9), tensor(0.99)), "foreach": True},
            ValueError,
            r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True",
        ),
        ({"foreach": True, "fused": True}, RuntimeError, "`fused` and `foreach` cannot be `True` together"),
        ({"fused": True, "differentiable": True}, RuntimeError, "`fused` does not support `differentiable`"),
        ({"projections": -1}, ValueError, "projections=-1 must be an integer >= 0"),
        ({"projections": 1.5}, ValueError, "projections=1.5 must be an integer >= 0"),
        ({"xi": 0.0}, ValueError, "xi=0.0 must be a finite number > 0"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm=0.0 must be a finite number > 0, or None"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite='ignore' must be one of 'skip', 'propagate', 'raise'"),
    ]
    found = [
        ErrorOptimizerInput(OptimizerInput(params=None, kwargs=kwargs), error_type=kind, error_regex=words)
        for kwargs, kind, words in values
    ]
    return [*get_error_inputs_for_all_optims(device, dtype), *found, _sparse_gradient(device, dtype)]


def _sparse_gradient(device: str, dtype: torch.dtype) -> ErrorOptimizerInput:
    weight = Parameter(torch.randn(4, 2, device=device, dtype=dtype))
    weight.grad = torch.randn_like(weight).to_sparse()
    return ErrorOptimizerInput(
        OptimizerInput(params=[weight], kwargs={}, desc="sparse gradient"),
        error_on=OptimizerErrorEnum.STEP_ERROR,
        error_type=RuntimeError,
        error_regex="Aida does not support sparse gradients.*sparse=False",
    )


AIDA = OptimizerInfo(
    Aida,
    optim_inputs_func=inputs,
    optim_error_inputs_func=error_inputs,
    scheduler_inputs=(
        [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
        [lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4)],
        [lambda opt: ExponentialLR(opt, gamma=0.9), lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
        [lambda opt: PolynomialLR(opt, power=0.9, total_iters=40), lambda opt: ReduceLROnPlateau(opt)],
        [lambda opt: OneCycleLR(opt, max_lr=0.01, total_steps=40)],  # which also moves beta1
    ),
    supported_impls=("foreach", "differentiable", "fused"),
    not_og_supported_flags=("foreach", "differentiable", "maximize", "capturable", "fused"),
    supports_sparse=False,
    has_capturable_arg=True,
    supports_complex=True,
    supports_fused_on=tuple(device for device in ("cpu", "cuda") if has_fused(device)),
)


def all_kwargs(device: str, *, differentiable: bool = False) -> list[tuple[str, Kwargs]]:
    """Every input on every path this device has, each with a name for the message of a failure.

    torch's own list leaves foreach out on a CPU, where torch's optimizers do not gain from it.
    ``differentiable`` is for tests whose parameters are not leaves.
    """
    choices = [kwargs for name, kwargs in IMPLEMENTATIONS.items() if name != "fused" or has_fused(device)]
    choices += [{"differentiable": True}] if differentiable else []
    return [
        (f"{one.desc} {choice}", {**deepcopy(one.kwargs), **choice}) for one in inputs(device) for choice in choices
    ]


def mark_gpu(module: dict[str, Any]) -> None:
    """Give the classes that torch generated for CUDA the marker ``gpu``."""
    for name, cls in module.items():
        if name.endswith("CUDA") and isinstance(cls, type):
            cls.pytestmark = pytest.mark.gpu


class Regression:
    """(w x + b)^2 for one x: the smallest problem whose loss says whether a step went downhill."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32, *, contiguous: bool = True) -> None:
        def tensor(*shape: int) -> Tensor:
            if contiguous:
                return torch.randn(shape, device=device, dtype=dtype)
            return torch.randn((*shape, 2), device=device, dtype=dtype)[..., 0]

        self.weight = Parameter(tensor(10, 5))
        self.bias = Parameter(tensor(10))
        self.x = torch.randn(5, device=device, dtype=dtype)

    @property
    def params(self) -> list[Parameter]:
        return [self.weight, self.bias]

    def copy(self) -> Regression:
        twin = object.__new__(Regression)
        twin.weight, twin.bias = (Parameter(p.detach().clone()) for p in self.params)
        twin.x = self.x
        return twin

    def loss(self) -> Tensor:
        return (self.weight.mv(self.x) + self.bias).pow(2).sum()

    def backward(self) -> Tensor:
        """New gradients in new memory, as zero_grad(set_to_none=True) leaves them; the loss."""
        for p in self.params:
            p.grad = None
        loss = self.loss()
        loss.backward()
        return loss
