"""What every path promises of a step: precision, gradients left alone, clipping, and tensors that sit one out."""

from __future__ import annotations

import pickle
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

from aida import Aida
from paths import NATIVE_PATHS, Path, over_paths

SHAPES = ((5,), (3, 4), (), (2, 3, 2), (0,), (257,))
LOW_PRECISION = (torch.bfloat16, torch.float16)


def parameters(path: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(s, generator=generator).to(path.device, dtype)) for s in SHAPES]


def give_gradients(params: list[Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)


def snapshot(params: list[Parameter], optimizer: Aida) -> Any:
    return deepcopy([[p.detach() for p in params], [dict(optimizer.state[p]) for p in params]])


def assert_bitwise(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# -- precision -----------------------------------------------------------------------------------


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_variance_of_low_precision_parameters_decays(path: Path, dtype: torch.dtype) -> None:
    steps, beta2, eps = 3000, 0.999, 1e-16
    p = Parameter(torch.ones(4, device=path.device, dtype=dtype))
    optimizer = path.make([p], betas=(0.9, beta2), eps=eps)
    for sign in (1.0, -1.0):  # the second differs from the mean, so there is a variance
        p.grad = torch.full_like(p, sign)
        optimizer.step()
    before = optimizer.state[p]["exp_avg_var"].double().clone()
    p.grad = torch.zeros_like(p)
    for _ in range(steps):
        optimizer.step()
    after = optimizer.state[p]["exp_avg_var"]
    assert after.dtype == torch.float32
    # a zero gradient projects to zero, so only eps joins what decays; 0.999 in float32 is 1.3e-8 too large
    decay = torch.tensor(beta2).item() ** steps
    expected = before * decay + eps * (1 - decay) / (1 - beta2)
    # beta2 * v is rounded 3000 times, by 6e-8 at most and in both directions
    assert_close(after.double(), expected, rtol=1e-5, atol=0)
    assert 0.049 < (after.double() / before).min() < 0.051


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-7, 1.0, 1e4])
def test_low_precision_steps_stay_finite(path: Path, dtype: torch.dtype, scale: float) -> None:
    params = parameters(path, dtype)
    optimizer = path.make(params, weight_decay=0.01)
    for step in range(20):
        give_gradients(params, step, scale)
        optimizer.step()
    for p in params:
        assert torch.isfinite(p).all()
        assert all(torch.isfinite(value).all() for value in optimizer.state[p].values())
    assert not optimizer.skipped()


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION], ids=str)
def test_checkpoint_resumes_bit_exactly(path: Path, dtype: torch.dtype) -> None:
    params = parameters(path, dtype)
    optimizer = path.make(params, weight_decay=0.1)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    saved = deepcopy(optimizer.state_dict())
    twins = [Parameter(p.detach().clone()) for p in params]
    other = path.make(twins)
    other.load_state_dict(saved)
    assert_bitwise(snapshot(twins, other), snapshot(params, optimizer))
    for step in range(3, 6):
        for mine, stepper in ((params, optimizer), (twins, other)):
            give_gradients(mine, step)
            stepper.step()
    assert_bitwise(snapshot(twins, other), snapshot(params, optimizer))


@over_paths(NATIVE_PATHS)
def test_copies_step_like_the_original(path: Path) -> None:
    params = parameters(path)
    optimizer = path.make(params)
    give_gradients(params, 0)
    optimizer.step()
    copies = [deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    give_gradients(params, 1)
    optimizer.step()
    for copy in copies:
        theirs = copy.param_groups[0]["params"]
        give_gradients(theirs, 1)
        copy.step()
        assert_bitwise(snapshot(theirs, copy), snapshot(params, optimizer))


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize(
    "kwargs", [{}, {"weight_decay": 0.1, "decoupled_weight_decay": False, "clip_norm": 0.5}], ids=["plain", "clipped"]
)
def test_two_runs_agree_bitwise(path: Path, kwargs: dict[str, Any]) -> None:
    def run() -> Any:
        # large enough that threads and blocks share a tensor
        params = [*parameters(path), Parameter(torch.linspace(-1, 1, 300_001, device=path.device))]
        optimizer = path.make(params, **kwargs)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        return snapshot(params, optimizer)

    assert_bitwise(run(), run())


# -- gradients -----------------------------------------------------------------------------------


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"weight_decay": 0.1, "decoupled_weight_decay": False, "maximize": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
        {"clip_norm": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": False},
        {"nonfinite": "propagate"},
    ],
    ids=lambda kwargs: "+".join(kwargs) or "default",
)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_gradients_are_left_as_they_came(path: Path, dtype: torch.dtype, kwargs: dict[str, Any], scaled: bool) -> None:
    params = parameters(path, dtype)
    optimizer = path.make(params, **kwargs)
    if scaled:
        optimizer.grad_scale = torch.full((), 8.0, device=path.device)
        optimizer.found_inf = torch.zeros((), device=path.device)
    for step in range(2):
        give_gradients(params, step)
        if step == 1:
            params[0].grad[0] = torch.nan
        grads = [p.grad for p in params]
        copies = [grad.clone() for grad in grads]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))
        assert_bitwise(grads, copies)


@over_paths()
def test_late_gradient_gets_its_own_bias_correction(path: Path) -> None:
    early, late, fresh = (Parameter(torch.ones(3, device=path.device)) for _ in range(3))
    optimizer, judge = path.make([early, late]), path.make([fresh])
    for step in range(12):
        early.grad = torch.full_like(early, 0.5)
        if step >= 9:
            late.grad = torch.linspace(-1, 1, 3, device=path.device) + step
            fresh.grad = late.grad.clone()
            judge.step()
        optimizer.step()
    assert optimizer.state[early]["step"].item() == 12
    assert optimizer.state[late]["step"].item() == 3
    assert_bitwise(late.detach(), fresh.detach())


# -- clipping ------------------------------------------------------------------------------------


@over_paths()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("clip_norm", [0.05, 3.0, 1e6])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"weight_decay": 0.1, "decoupled_weight_decay": False, "maximize": True, "projections": 3}],
    ids=["", "decay"],
)
def test_clip_norm_equals_clip_grad_norm(
    path: Path, dtype: torch.dtype, clip_norm: float, groups: int, kwargs: dict[str, Any]
) -> None:
    def grouped(params: list[Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[i::groups], "lr": 1e-2 * (i + 1)} for i in range(groups)]

    inside, before = parameters(path, dtype), parameters(path, dtype)
    clipping = path.make(grouped(inside), clip_norm=clip_norm, **kwargs)
    plain = path.make(grouped(before), **kwargs)
    for step in range(5):
        give_gradients(inside, step)
        give_gradients(before, step)
        clipping.step()
        clip_grad_norm_(before, clip_norm)
        plain.step()
    tolerance = {"rtol": 1e-11, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    assert_close([p.detach() for p in inside], [p.detach() for p in before], **tolerance)


@over_paths(NATIVE_PATHS)
def test_clip_norm_is_one_norm_over_dtypes(path: Path) -> None:
    inside, before = ([*parameters(path, torch.float64), *parameters(path, torch.float32, seed=1)] for _ in range(2))
    clipping, plain = path.make(inside, clip_norm=0.5), path.make(before)
    for step in range(3):
        give_gradients(inside, step)
        give_gradients(before, step)
        clipping.step()
        clip_grad_norm_(before, 0.5)
        plain.step()
    assert_close([p.detach() for p in inside], [p.detach() for p in before], rtol=1e-5, atol=1e-6)


@over_paths()
def test_clipping_group_does_not_see_the_others(path: Path) -> None:
    clipped, free = parameters(path)[:2]
    twins = [Parameter(p.detach().clone()) for p in (clipped, free)]
    optimizer = path.make([{"params": [clipped], "clip_norm": 0.1}, {"params": [free]}])
    judge = path.make(twins)
    give_gradients([clipped, free], 0, 10.0)
    give_gradients(twins, 0, 10.0)
    clip_grad_norm_(twins[:1], 0.1)
    optimizer.step()
    judge.step()
    assert_close([clipped.detach(), free.detach()], [p.detach() for p in twins], rtol=1e-5, atol=1e-6)


# -- tensors that sit a step out -----------------------------------------------------------------


@over_paths()
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(
    "kwargs", [{}, {"clip_norm": 0.5, "weight_decay": 0.1, "decoupled_weight_decay": False}], ids=["plain", "clipped"]
)
def test_skip_leaves_one_tensor_and_moves_the_rest(path: Path, bad: float, kwargs: dict[str, Any]) -> None:
    params, clean = parameters(path), parameters(path)
    optimizer, judge = path.make(params, **kwargs), path.make(clean, **kwargs)
    for step in range(3):
        give_gradients(params, step)
        give_gradients(clean, step)
        if step == 1:
            params[1].grad[1, 2] = bad
            clean[1].grad = None  # what it comes down to: as if there had been no gradient
        optimizer.step()
        judge.step()
        assert optimizer.skipped() == (Counter({"0.1": 1}) if step else Counter())
    optimizer.state[params[1]]["skipped"].zero_()
    assert_close(snapshot(params, optimizer), snapshot(clean, judge))
    assert optimizer.state[params[1]]["step"].item() == 2


@over_paths()
def test_skip_at_the_first_step_leaves_zero_state(path: Path) -> None:
    p = Parameter(torch.ones(3, device=path.device))
    optimizer = path.make([p])
    p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert_bitwise(p.detach(), torch.ones(3, device=path.device))
    state = {key: value.tolist() for key, value in optimizer.state[p].items()}
    assert state == {"step": 0.0, "exp_avg": [0.0] * 3, "exp_avg_var": [0.0] * 3, "skipped": 1.0}


@over_paths()
def test_skipped_counts_by_name_and_survives_a_checkpoint(path: Path) -> None:
    params = [(f"layer{i}.weight", p) for i, p in enumerate(parameters(path)[:3])]
    optimizer = path.make(params)
    for step in range(4):
        give_gradients([p for _, p in params], step)
        if step in (1, 3):
            params[0][1].grad[0] = torch.inf
        if step == 3:
            params[2][1].grad.fill_(torch.nan)
        optimizer.step()
    counts = optimizer.skipped()
    assert isinstance(counts, Counter)
    assert counts == {"layer0.weight": 2, "layer2.weight": 1}
    assert counts["layer1.weight"] == 0
    other = path.make(params)
    other.load_state_dict(optimizer.state_dict())
    assert other.skipped() == counts


@over_paths()
def test_layer_whose_length_overflows_counts_as_not_finite(path: Path) -> None:
    # every element is finite, but |g|^2 is beyond float32, and with it every projection
    p = Parameter(torch.ones(4, device=path.device))
    optimizer = path.make([p])
    p.grad = torch.full_like(p, 1e25)
    optimizer.step()
    assert_bitwise(p.detach(), torch.ones(4, device=path.device))
    assert optimizer.skipped() == {"0.0": 1}


@over_paths()
def test_propagate_computes_on(path: Path) -> None:
    params = parameters(path)
    optimizer = path.make(params, nonfinite="propagate")
    give_gradients(params, 0)
    params[0].grad[0] = torch.nan
    optimizer.step()
    assert torch.isnan(params[0]).any()
    assert all(torch.isfinite(p).all() for p in params[1:])
    assert all(optimizer.state[p]["step"].item() == 1 for p in params)
    assert not optimizer.skipped()


@over_paths()
@pytest.mark.parametrize("named", [False, True], ids=["", "named"])
def test_raise_names_the_tensor_before_anything_changed(path: Path, named: bool) -> None:
    params = parameters(path)
    given: Any = [(f"block.{i}", p) for i, p in enumerate(params)] if named else params
    optimizer = path.make(given, nonfinite="raise")
    give_gradients(params, 0)
    optimizer.step()
    before = snapshot(params, optimizer)
    give_gradients(params, 1)
    params[3].grad[0, 0, 0] = torch.inf
    name = "block.3" if named else r"0\.3"
    with pytest.raises(RuntimeError, match=rf"gradient of parameter {name} holds NaN or inf; nothing was changed"):
        optimizer.step()
    assert_bitwise(snapshot(params, optimizer), before)
    give_gradients(params, 1)
    optimizer.step()
    assert all(optimizer.state[p]["step"].item() == 2 for p in params)


@over_paths()
def test_each_group_has_its_own_answer(path: Path) -> None:
    careful, strict = parameters(path)[:2]
    optimizer = path.make([{"params": [careful]}, {"params": [strict], "nonfinite": "raise"}])
    give_gradients([careful, strict], 0)
    careful.grad[0] = torch.nan
    optimizer.step()
    assert optimizer.skipped() == {"0.0": 1}
    give_gradients([careful, strict], 1)
    careful.grad[0] = torch.nan
    strict.grad[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=r"parameter 1\.0 holds"):
        optimizer.step()
    assert optimizer.skipped() == {"0.0": 1}


@over_paths()
def test_scaler_s_overflow_is_nobody_s_error(path: Path) -> None:
    for nonfinite in ("skip", "propagate", "raise"):
        p = Parameter(torch.ones(3, device=path.device))
        optimizer = path.make([p], nonfinite=nonfinite)
        p.grad = torch.full_like(p, torch.inf)
        optimizer.grad_scale = torch.full((), 4.0, device=path.device)
        optimizer.found_inf = torch.ones((), device=path.device)
        optimizer.step()
        assert_bitwise(p.detach(), torch.ones(3, device=path.device))
        assert optimizer.state[p]["step"].item() == 0
        assert not optimizer.skipped()


def test_reading_the_counts_of_a_new_optimizer_is_harmless() -> None:
    p: Tensor = Parameter(torch.ones(2))
    optimizer = Aida([p])
    assert optimizer.skipped() == Counter()
    assert not optimizer.state


def test_a_momentum_cycle_may_put_a_float_beside_a_tensor_beta() -> None:
    param = torch.ones(5, requires_grad=True)
    optimizer = Aida([param], betas=(torch.tensor(0.9), torch.tensor(0.999)))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
    for _ in range(5):
        param.grad = torch.ones_like(param)
        optimizer.step()
        scheduler.step()
    assert float(optimizer.state[param]["step"]) == 5
    assert param.max() < 1
