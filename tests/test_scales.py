"""Gradients from 1e-25 to 1e25: every path decides alike what it can use, and is exact where it can."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from aida import Aida
from paths import NATIVE_PATHS, Path, over_paths
from transcription import Transcription

FLOAT32_MAX = torch.finfo(torch.float32).max
SCALES = [10.0**exponent for exponent in (*range(-25, 26, 5), 16, 17, 18, 19)]
#: Of parameters: bf16 and fp16 round them, and are compared by their float32 state instead.
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def gradients(scale: float, dtype: torch.dtype, count: int = 700) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(count, generator=generator, dtype=torch.float64)
    return [
        (scale * (signal + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64))).to(dtype)
        for _ in range(3)
    ]


def fits(scale: float, dtype: torch.dtype) -> bool:
    """Whether numbers of that size can be written in the dtype at all."""
    info = torch.finfo(dtype)
    return info.smallest_normal * 10 < scale < info.max / 10


def usable(grad: Tensor) -> bool:
    """The rule of docs/numerics.md: the squared norm must be a number of the state's dtype."""
    squared = float(grad.double().square().sum())
    return squared <= (FLOAT32_MAX if grad.dtype != torch.float64 else torch.finfo(torch.float64).max)


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_scale_is_exact_or_skipped_by_one_rule(path: Path, dtype: torch.dtype, clip_norm: float | None) -> None:
    for scale in SCALES:
        if not fits(scale, dtype):
            continue
        grads = gradients(scale, dtype)
        p = Parameter(torch.zeros(len(grads[0]), dtype=dtype, device=path.device))
        optimizer = path.make([p], lr=1e-3, clip_norm=clip_norm)
        judge = Transcription(np.zeros(len(grads[0])))
        skipped = 0
        for grad in grads:
            p.grad = grad.to(path.device)
            optimizer.step()
            exact = grad.double()
            if clip_norm is not None:
                exact = exact * min(1.0, clip_norm / (float(exact.norm()) + 1e-6))
            elif not usable(grad):
                skipped += 1
                continue
            judge.step(exact.numpy())
        state = optimizer.state[p]
        assert int(state["skipped"]) == skipped, scale
        assert int(state["step"]) == len(grads) - skipped, scale
        tolerance = 1e-11 if dtype == torch.float64 else 2e-5
        for found, right in ((state["exp_avg"], judge.m), (state["exp_avg_var"], judge.v)):
            assert_relative(found, right, tolerance, f"{scale:g}")
        if dtype in (torch.float64, torch.float32):
            assert_relative(p.detach(), judge.theta, tolerance, f"{scale:g}")


def assert_relative(found: Tensor, right: np.ndarray, tolerance: float, what: str) -> None:
    error = float(np.abs(found.double().cpu().numpy() - right).max())
    assert error <= tolerance * max(float(np.abs(right).max()), 1e-300), what


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize(("value", "skips"), [(1e16, 0), (3e16, 0), (1e17, 1)])
def test_the_norm_of_a_layer_decides_not_that_of_its_chunks(path: Path, value: float, skips: int) -> None:
    """300,000 elements of 1e17: the square of every chunk is a float32, that of the layer is not."""
    p = Parameter(torch.zeros(300_000, device=path.device))
    optimizer = path.make([p])
    p.grad = torch.full_like(p, value)
    optimizer.step()
    assert int(optimizer.state[p]["skipped"]) == skips
    assert bool(p.any()) == (not skips)


@over_paths()
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_without_projections_a_bad_element_spoils_itself_alone(path: Path, bad: float) -> None:
    p = Parameter(torch.ones(40, device=path.device))
    optimizer = path.make([p], projections=0, nonfinite="propagate")
    for _ in range(2):
        p.grad = torch.linspace(0.1, 1, 40, device=path.device)
        p.grad[7] = bad
        optimizer.step()
    wrong = ~torch.isfinite(p.detach())
    assert wrong.nonzero().flatten().tolist() in ([7], [])  # m / sqrt(v) is inf / inf, or 0 where only v is infinite
    twin = Parameter(torch.ones(40, device=path.device))
    judge = Aida([twin], projections=0)
    for _ in range(2):
        twin.grad = torch.linspace(0.1, 1, 40, device=path.device)
        judge.step()
    others = torch.arange(40, device=path.device) != 7
    torch.testing.assert_close(p.detach()[others], twin.detach()[others])
