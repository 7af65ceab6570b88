"""Tensors that AdamW accepts, or that end its process: the rivals update them, or refuse them in words."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from catalog_cases import NAMES, NATIVE, build, over_paths

#: Those with an update of their own; torch's classes and Aida have tests elsewhere.
OWN = [name for name in NAMES if name not in (*NATIVE, "aida")]
over_own = pytest.mark.parametrize("name", OWN)

FREED = {
    "parameter": "p",
    "gradient": "p.grad",
    "state": "next((v for v in o.state.get(p, {}).values() if v.ndim), p)",
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("what", FREED.values(), ids=FREED)
def test_freed_memory_is_refused_and_ends_no_process(what: str, foreach: bool) -> None:
    """In a process of its own, which torch's operations would end."""
    program = f"""
import torch
from aida.catalog import catalog
for name in {OWN}:
    p = torch.nn.Parameter(torch.randn(300, 400))
    o = catalog()[name].build([p], foreach={foreach})
    p.grad = torch.randn_like(p)
    o.step()
    ({what}).untyped_storage().resize_(0)
    try:
        o.step()
    except RuntimeError as error:
        assert "was freed" in str(error), error
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@over_paths
@over_own
def test_a_wrapped_gradient_leaves_the_other_parameters_alone(name: str, flags: dict[str, Any]) -> None:
    """TwoTensor runs every operation twice, on lists for all of their tensors."""
    results = []
    for wrap in (False, True):
        params = [Parameter(torch.linspace(-1, 1, 6).reshape(shape)) for shape in ((2, 3), (6,), (3, 2))]
        optimizer = build(name, params, **flags)
        for step in range(3):
            for p in params:
                p.grad = torch.full_like(p, 0.5 + step)
            if wrap:
                params[1].grad = TwoTensor(params[1].grad, params[1].grad.clone())
            optimizer.step()
        results.append([params[0].detach(), params[2].detach()])
    assert_close(results[1], results[0])


@over_own
def test_fake_tensors_are_stepped_as_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        p = Parameter(torch.ones(3, 4))
        optimizer = build(name, [p])
        for _ in range(6):  # RAdam's rule changes in the sixth
            p.grad = torch.ones_like(p)
            optimizer.step()


@over_paths
@over_own
def test_lazy_modules_are_accepted_and_take_part_once_they_have_seen_their_input(
    name: str, flags: dict[str, Any]
) -> None:
    model = nn.LazyLinear(2)
    optimizer = build(name, model.parameters(), **flags)
    optimizer.step()
    model(torch.ones(3, 4)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))


@over_paths
@over_own
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_a_frozen_parameter_of_any_dtype_is_left_alone(name: str, flags: dict[str, Any], dtype: torch.dtype) -> None:
    p, frozen = Parameter(torch.ones(3)), Parameter(torch.ones(3).to(dtype), requires_grad=False)
    optimizer = build(name, [frozen, p], **flags)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert frozen not in optimizer.state
    assert (p != 1).all()


@over_paths
@over_own
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_given_twice_is_updated_once(name: str, flags: dict[str, Any]) -> None:
    twice, once = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    for p, params in ((twice, [twice, twice]), (once, [once])):
        optimizer = build(name, params, **flags)
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert_close(twice.detach(), once.detach())


@over_own
def test_a_method_that_needs_whole_layers_refuses_those_that_fsdp1_flattened(name: str) -> None:
    p = Parameter(torch.ones(3))
    optimizer = build(name, [p])
    p.grad = torch.ones_like(p)
    p._fsdp_flattened = True
    if not optimizer.layerwise:
        optimizer.step()
        return
    with pytest.raises(TypeError, match="FSDP"):
        optimizer.step()
    with pytest.raises(TypeError, match="FSDP"):
        build(name, [p])
