"""Every rival against its rule, written down independently in NumPy; torch's own against torch, bitwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aida.baselines.adabound import AdaBound
from aida.baselines.msvag import MSVAG
from aida.baselines.radam import RAdam, rectification
from aida.baselines.yogi import Yogi
from aida.catalog import catalog, find
from rival_rules import RULES, Vector

STEPS = 50
TOLERANCE = 1e-12

ADAM = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8}
L2 = {**ADAM, "weight_decay": 0.1}
DECOUPLED = {**L2, "decoupled_weight_decay": True}

#: name of the rival, what the case is about, values
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "plain", ADAM) for name in ("adabelief", "adabelief-star", "adam-plus", "radam", "yogi", "adabound")),
    *((name, "decoupled", DECOUPLED) for name in ("adabelief", "adabelief-star", "adam-plus", "yogi", "adabound")),
    *((name, "l2", L2) for name in ("adabelief", "adabelief-star", "adam-plus", "yogi", "adabound")),
    ("adabelief", "tiny-eps", {**ADAM, "eps": 1e-16}),
    ("adabelief", "no-momentum", {**ADAM, "betas": (0.0, 0.5)}),
    ("radam", "paper", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}),
    ("radam", "l2", {**L2, "decoupled_weight_decay": False}),
    ("radam", "never-adaptive", {**ADAM, "betas": (0.9, 0.5)}),
    ("yogi", "own-defaults", {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3}),
    ("yogi", "from-zero", {**ADAM, "eps": 1e-3, "initial_accumulator": 0.0}),
    ("adabound", "bounds-bite", {**ADAM, "final_lr": 0.01, "gamma": 0.5}),
    ("adabound", "base-lr", {**ADAM, "base_lr": 1e-3, "gamma": 0.1}),
    ("msvag", "plain", {"lr": 0.1, "betas": (0.9, 0.999)}),
    ("msvag", "l2", {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.1}),
    ("msvag", "decoupled", {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("msvag", "mixed", {"lr": 0.1, "betas": (0.9, 0.999), "mixed_bias_correction": True}),
    ("fromage", "plain", {"lr": 0.01}),
    ("fromage", "long-steps", {"lr": 0.1}),
]

over_cases = pytest.mark.parametrize(
    ("name", "values"), [pytest.param(name, values, id=f"{name}-{about}") for name, about, values in CASES]
)
over_paths = pytest.mark.parametrize("foreach", [False, True], ids=["plain", "foreach"])


def problem(seed: int = 0) -> tuple[list[Vector], list[list[Vector | None]]]:
    """Weights and the gradients of all steps: of many scales, with zeros, one tensor starting late, one pausing."""
    rng = np.random.default_rng(seed)
    shapes = [(3, 4), (7,), (), (2, 3, 2), (5,), (4,)]
    scales = [1.0, 1e-4, 10.0, 0.1, 1.0, 1.0]
    weights = [np.asarray(rng.normal(size=shape)) for shape in shapes]
    weights[5] = np.zeros(4)  # Fromage has a rule of its own for a norm of 0
    drifts = [rng.normal(size=shape) for shape in shapes]
    grads: list[list[Vector | None]] = []
    for t in range(STEPS):
        row: list[Vector | None] = [
            np.asarray(scale * (drift + rng.normal(size=shape)))
            for scale, drift, shape in zip(scales, drifts, shapes, strict=True)
        ]
        row[0][0, :2] = 0.0  # type: ignore[index]
        if t < 7:
            row[3] = None
        if t % 3 == 1:
            row[4] = None
        if t == 4:
            row[1] = np.zeros(7)
        grads.append(row)
    return weights, grads


def as_parameters(weights: list[Vector]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor(w, dtype=torch.float64)) for w in weights]


def give(params: list[torch.nn.Parameter], row: list[Vector | None]) -> list[Tensor | None]:
    for p, g in zip(params, row, strict=True):
        p.grad = None if g is None else torch.tensor(g, dtype=torch.float64)
    return [None if p.grad is None else p.grad.clone() for p in params]


def test_every_rival_of_the_catalog_is_judged() -> None:
    native = {name for name, entry in catalog().items() if entry.optimizer.__module__.startswith("torch.")}
    assert native == {"sgd", "adam", "adamw"}
    assert {name for name, _, _ in CASES} == set(catalog()) - native - {"aida"} == set(RULES)


@over_paths
@over_cases
def test_fifty_steps_agree_with_the_rule_in_float64(name: str, values: dict[str, Any], foreach: bool) -> None:
    weights, grads = problem()
    runs = [RULES[name](weight, [row[i] for row in grads], **values) for i, weight in enumerate(weights)]
    params = as_parameters(weights)
    optimizer = find(name).build(params, **values, foreach=foreach)
    worst = 0.0
    for row in grads:
        given = give(params, row)
        optimizer.step()
        for p, run in zip(params, runs, strict=True):
            worst = max(worst, float(np.max(np.abs(p.detach().numpy() - next(run)), initial=0.0)))
        for p, g in zip(params, given, strict=True):
            assert (p.grad is None) if g is None else torch.equal(p.grad, g)  # type: ignore[arg-type]
    assert worst <= TOLERANCE
    assert any(not torch.equal(p, torch.tensor(w)) for p, w in zip(params, weights, strict=True))


@over_paths
@over_cases
def test_maximize_is_the_rule_with_the_gradient_turned_around(name: str, values: dict[str, Any], foreach: bool) -> None:
    weights, grads = problem(1)
    up, down = as_parameters(weights), as_parameters(weights)
    climbing = find(name).build(up, **values, foreach=foreach, maximize=True)
    falling = find(name).build(down, **values, foreach=foreach)
    for row in grads[:10]:
        give(up, row)
        give(down, [None if g is None else -g for g in row])
        climbing.step()
        falling.step()
    for p, q in zip(up, down, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sgd", {}),
        ("sgd", {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1}),
        ("adam", {}),
        ("adam", {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.1}),
        ("adamw", {}),
        ("adamw", {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.1}),
    ],
)
def test_torch_s_own_methods_are_torch_s_bit_for_bit(name: str, values: dict[str, Any]) -> None:
    weights, grads = problem(2)
    ours, theirs = as_parameters(weights), as_parameters(weights)
    own_values = {**({"lr": 0.1, "momentum": 0.9} if name == "sgd" else {}), **values}
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer, judge = find(name).build(ours, **values), kinds[name](theirs, **own_values)
    for row in grads:
        give(ours, row)
        give(theirs, row)
        optimizer.step()
        judge.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


# -- what sets a method apart ----------------------------------------------------------------------


def test_radam_with_l2_is_torch_s_radam() -> None:
    weights, grads = problem(3)
    ours, theirs = as_parameters(weights), as_parameters(weights)
    optimizer = RAdam(ours, weight_decay=0.1, decoupled_weight_decay=False)
    judge = torch.optim.RAdam(theirs, weight_decay=0.1)
    for row in grads:
        give(ours, row)
        give(theirs, row)
        optimizer.step()
        judge.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=TOLERANCE)


def test_radam_takes_plain_momentum_steps_until_the_second_moment_has_seen_enough() -> None:
    adaptive, factor = rectification(torch.arange(1, 11, dtype=torch.float64), 0.999)
    assert adaptive.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert torch.isfinite(factor).all()
    assert (factor[:5] == 1).all()
    assert (factor[5:] < 1).all()


def test_adabound_s_final_rate_follows_the_schedule_and_survives_a_checkpoint() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = AdaBound([p], lr=1e-2, final_lr=0.1, gamma=1e9)  # bounds closed: SGD with momentum
    optimizer.param_groups[0]["lr"] = 1e-3
    revived = AdaBound([p], lr=5.0)
    revived.load_state_dict(optimizer.state_dict())
    assert revived.param_groups[0]["base_lr"] == 1e-2
    p.grad = torch.ones(3, dtype=torch.float64)
    revived.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - 0.01 * 0.1, dtype=torch.float64), rtol=1e-8, atol=0)


def test_adabound_remembers_the_base_rate_of_each_group() -> None:
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = AdaBound([{"params": params[:1]}, {"params": params[1:2], "lr": 0.5}], lr=0.1)
    optimizer.add_param_group({"params": params[2:], "lr": 0.0, "base_lr": 0.3})
    assert [group["base_lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.3]


def test_msvag_moves_in_its_first_step_unless_the_comparison_s_quirk_is_asked_for() -> None:
    moved = []
    for mixed in (False, True):
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([1.0, -2.0])
        MSVAG([p], lr=0.1, mixed_bias_correction=mixed).step()
        moved.append(p.detach().clone())
    torch.testing.assert_close(moved[0], torch.tensor([-0.1, 0.2]))
    assert torch.equal(moved[1], torch.zeros(2))


def test_msvag_s_mixed_correction_damps_as_the_comparison_s_code_does() -> None:
    """Mean gamma for gradients of mean 0.5 and variance 1: what the catalog says of the quirk."""
    reading = find("msvag").reading
    found = {}
    for mixed in (True, False):
        rng = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.zeros(200_000))
        optimizer = MSVAG([p], betas=(0.9, 0.999), mixed_bias_correction=mixed)
        for t in range(1, 101):
            p.grad = torch.randn(p.shape, generator=rng) + 0.5
            optimizer.step()
            if t in (2, 100):
                state, group = optimizer.state[p], optimizer.param_groups[0]
                chunks = [state[key] for key in reading.keys(group)]
                assert reading.stepsize is not None
                found[mixed, t] = float(reading.stepsize(chunks, state["step"], group).mean())
    assert found[True, 2] == pytest.approx(0.006, abs=5e-4)
    assert found[True, 100] == pytest.approx(0.26, abs=6e-3)
    assert found[False, 2] == pytest.approx(0.56, abs=6e-3)
    assert found[False, 100] == pytest.approx(0.75, abs=6e-3)


def test_yogi_s_moments_start_from_the_initial_accumulator() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.zeros(3)
    optimizer = Yogi([p], initial_accumulator=0.25)
    optimizer.step()
    assert optimizer.state[p]["exp_avg_sq"].tolist() == [0.25] * 3
    assert optimizer.state[p]["exp_avg"].tolist() == pytest.approx([0.225] * 3)


def test_fromage_keeps_no_state_and_refuses_weight_decay() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = find("fromage").build([p])
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    with pytest.raises(TypeError, match="weight_decay"):
        find("fromage").build([p], weight_decay=0.1)
