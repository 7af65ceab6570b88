"""The optimizers of the catalog as cases, small problems for them, and where one may differ and why."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from aida.catalog import catalog, find

NAMES = tuple(catalog())
NATIVE = ("sgd", "adam", "adamw")
PATHS: dict[str, dict[str, Any]] = {"default": {}, "plain": {"foreach": False}, "foreach": {"foreach": True}}
SHAPES = ((4, 3), (5,), (), (2, 3, 2), (0,))
STEPS = 8

#: (law, optimizer) and why this optimizer, one of torch's own but for one, does not keep it.
DIFFERS: dict[tuple[str, str], str] = {
    **{
        ("float32-state", name): "torch keeps the state in the parameter's dtype, so a bf16 second moment cannot decay"
        for name in NATIVE
    },
    **{("low-precision-fp16", name): "eps 1e-8 is 0 in fp16: 0 / 0 where the gradient is 0" for name in NATIVE[1:]},
    **{("rounded-once", name): "torch computes the step in the parameter's dtype" for name in NATIVE},
    **{("spelling", name): "torch lets any key into a group and ignores it" for name in NATIVE},
    **{("changed-value", name): "torch checks values in the constructor alone" for name in NATIVE},
    **{("group-value", name): "torch checks the defaults, not what a group says" for name in NATIVE},
    **{("foreign-checkpoint", name): "torch loads any state dict whose groups have the right sizes" for name in NATIVE},
    ("foreign-checkpoint", "fromage"): "it has one value and no state: whatever has an lr fits",
    **{("marked-gradient", name): "torch takes a real view, which there is none of" for name in NATIVE[1:]},
    **{("marked-parameter", name): "torch lets it in; list operations then fail in the step" for name in NATIVE},
    ("sparse", "sgd"): "torch's SGD does take sparse gradients",
}


def over_catalog(law: str | None = None) -> pytest.MarkDecorator:
    """Run a test that takes ``name`` for every optimizer; where it is known not to keep the law, it must fail."""
    marks = {
        name: [pytest.mark.xfail(reason=reason, strict=True)]
        for (about, name), reason in DIFFERS.items()
        if about == law
    }
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks.get(name, [])) for name in NAMES])


over_paths = pytest.mark.parametrize("flags", PATHS.values(), ids=PATHS.keys())


def values_of(name: str, **wanted: Any) -> dict[str, Any]:
    """Of the wanted values those that the optimizer knows: Fromage has no weight decay, SGD no betas."""
    known = build(name, [Parameter(torch.zeros(1))]).param_groups[0]
    return {key: value for key, value in wanted.items() if key in known}


def build(name: str, params: Any, **values: Any) -> Optimizer:
    return find(name).build(params, **values)


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    rng = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """The gradients of a step, the same whoever asks: the fourth tensor starts late, the second pauses."""
    rng = torch.Generator().manual_seed(1000 + step)
    found: list[Tensor | None] = [torch.randn(shape, generator=rng).to(dtype) for shape in SHAPES]
    if step < 3:
        found[3] = None
    if step % 3 == 2:
        found[1] = None
    return found


def train(params: list[Parameter], optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        for p, g in zip(params, gradients(step, params[0].dtype), strict=True):
            p.grad = g
        optimizer.step()


def snapshot(params: list[Parameter], optimizer: Optimizer) -> list[Any]:
    """Everything a step can change, ready to be compared bit for bit."""
    found: list[Any] = [p.detach().clone() for p in params]
    for p in params:
        found += [(key, copy.deepcopy(value)) for key, value in sorted(optimizer.state.get(p, {}).items())]
    return found


def assert_identical(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if isinstance(a, tuple):
            assert a[0] == b[0]
            a, b = a[1], b[1]
        assert (torch.equal(a, b) and a.dtype == b.dtype) if isinstance(a, Tensor) else a == b


def reread(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint goes; ``weights_only`` refuses anything but plain values and tensors."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def moments(state: dict[str, Any]) -> dict[str, Tensor]:
    """The state tensors of the parameter's shape."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim > 0}
