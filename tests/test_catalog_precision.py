"""bf16 and fp16 parameters under every optimizer of the catalog: float32 state, one rounding, no NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from catalog_cases import (
    build,
    moments,
    over_catalog,
    over_paths,
    reread,
    values_of,
)


@over_paths
@over_catalog("float32-state")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_state_of_a_low_precision_parameter_is_that_of_a_float32_one(
    name: str, flags: dict[str, Any], dtype: torch.dtype
) -> None:
    """Fed with the same gradients. Large ones first, so that a second moment must be able to fall again."""
    low, full = Parameter(torch.ones(64, dtype=dtype)), Parameter(torch.ones(64))
    values = values_of(name, betas=(0.9, 0.99))
    optimizer, judge = build(name, [low], **values, **flags), build(name, [full], **values, **flags)
    rng = torch.Generator().manual_seed(0)
    for step in range(60):
        low.grad = (torch.randn(64, generator=rng) * (1.0 if step < 10 else 1e-3)).to(dtype)
        full.grad = low.grad.float()
        optimizer.step()
        judge.step()
    optimizer.load_state_dict(reread(optimizer.state_dict()))
    found, expected = moments(optimizer.state[low]), moments(judge.state[full])
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == torch.float32
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=0)
    if name == "fromage":
        assert found == {}  # nothing to keep


@over_paths
@over_catalog("rounded-once")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_low_precision_step_is_the_float32_step_rounded_once(
    name: str, flags: dict[str, Any], dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(0)
    low = Parameter(torch.randn(512, generator=rng).to(dtype))
    values = values_of(name, lr=0.03, weight_decay=0.3)
    optimizer = build(name, [low], **values, **flags)
    full = Parameter(low.detach().float())
    judge = build(name, [full], **values, **flags)
    for _ in range(3):
        with torch.no_grad():
            full.copy_(low)
        low.grad = torch.randn(512, generator=rng).to(dtype)
        full.grad = low.grad.float()
        optimizer.step()
        judge.step()
        assert torch.equal(low, full.detach().to(dtype))


@over_paths
@over_catalog("low-precision-fp16")
def test_fp16_parameters_stay_finite_whatever_the_scale_of_the_gradient(name: str, flags: dict[str, Any]) -> None:
    scales = torch.tensor([0.0, 1e-7, 1e-3, 1.0, 1e3], dtype=torch.float16)
    p = Parameter(torch.ones(5, dtype=torch.float16))
    optimizer = build(name, [p], lr=1e-3, **flags)
    for step in range(20):
        p.grad = scales * (-1) ** step
        optimizer.step()
    assert torch.isfinite(p).all()
    for value in moments(optimizer.state.get(p, {})).values():
        assert torch.isfinite(value).all()
