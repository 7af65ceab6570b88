"""State in bf16 and 8 bits, and bf16 and fp16 weights that lose no updates: exactness, checkpoints, measurements."""

from __future__ import annotations

import copy
import io
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from aida import Aida, StepsizeProbe, explain
from aida._step.layers import layers_of
from aida._step.state import layer_states
from paths import NATIVE_PATHS, Path, over_paths
from stored_state import Stored

HYPER: dict[str, Any] = {"lr": 1e-2, "eps": 1e-12}
FP8, BF16 = {"state_precision": "fp8"}, {"state_precision": "bfloat16"}
RANDOM, KAHAN = {"stochastic_rounding": True}, {"kahan_sum": True}

#: Dtype of the parameters and how they are stored.
STORAGES = [
    (torch.float32, BF16), (torch.float32, FP8), (torch.bfloat16, FP8), (torch.bfloat16, RANDOM),
    (torch.float16, RANDOM), (torch.bfloat16, KAHAN), (torch.float16, KAHAN), (torch.bfloat16, FP8 | RANDOM),
    (torch.float16, BF16 | KAHAN), (torch.bfloat16, FP8 | KAHAN | {"rounding_seed": 5}),
]  # fmt: skip
EACH_STORAGE = pytest.mark.parametrize(
    ("dtype", "storage"), STORAGES, ids=[f"{str(d)[6:]}-{'-'.join(s)}" for d, s in STORAGES]
)
#: More than a chunk of the C kernel, and not a multiple of a block.
SIZE = 4200


def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(params: list[Parameter], optimizer: Aida, first: int = 0, steps: int = 4) -> Aida:
    for step in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = (0.1 * noise(tuple(p.shape), 100 * step + i)).to(p)
        optimizer.step()
    return optimizer


def make(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = ((SIZE,), (10,))) -> list[Parameter]:
    return [Parameter(noise(shape, 1000 + i).to(dtype)) for i, shape in enumerate(shapes)]


def moments(optimizer: Aida, p: Tensor) -> tuple[Tensor, Tensor]:
    """The moments of a parameter that is one layer, as numbers."""
    group = next(group for group in optimizer.param_groups if any(q is p for q in group["params"]))
    (state,) = layer_states(optimizer.state[p], p, layers_of(p, group), group)
    return state["exp_avg"].double(), state["exp_avg_var"].double()


def same(one: Aida, other: Aida) -> bool:
    pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    return all(
        torch.equal(p, q) and one.state[p].keys() == other.state[q].keys()
        and all(torch.equal(value, other.state[q][key]) for key, value in one.state[p].items())
        for p, q in pairs
    )  # fmt: skip


# -- the update ----------------------------------------------------------------------------------------


@EACH_STORAGE
@over_paths(NATIVE_PATHS)
def test_a_step_is_that_of_the_transcription_with_the_same_random_bits(
    path: Path, dtype: torch.dtype, storage: dict[str, Any]
) -> None:
    (p, *_) = params = [Parameter(t.data.to(path.device)) for t in make(dtype)]
    optimizer = path.make(params, **HYPER, **storage)
    rounding = "stochastic" if "stochastic_rounding" in storage else "kahan" if "kahan_sum" in storage else "nearest"
    judge = Stored(
        p.detach().double().cpu().numpy(), lr=1e-2, eps=1e-12, state=storage.get("state_precision", "float32"),
        rounding=rounding, weights=str(dtype)[6:], seed=storage.get("rounding_seed", 0),
    )  # fmt: skip
    for step in range(4):
        if step:  # from the same numbers, or a single rounding that differs would spread
            m, v = moments(optimizer, p)
            judge.m, judge.v, judge.theta = m.cpu().numpy(), v.cpu().numpy(), p.detach().double().cpu().numpy()
            if "compensation" in optimizer.state[p]:
                judge.compensation = optimizer.state[p]["compensation"].double().cpu().numpy()
        trained(params, optimizer, step, 1)
        assert p.grad is not None
        judge.step(p.grad.double().cpu().numpy())
        m, v = moments(optimizer, p)
        for mine, other in ((m, judge.m), (v, judge.v), (p.detach().double(), judge.theta)):
            gap = np.abs(mine.cpu().numpy() - other)
            # a float32 error may move a number across the boundary of a rounding, by one unit in the last place
            assert (gap > 1e-4 * np.abs(other) + 1e-7 * np.abs(other).max()).mean() < 1e-3
            assert (gap <= 0.3 * np.abs(other) + 0.01 * np.abs(other).max()).all()


@EACH_STORAGE
def test_every_path_has_the_same_random_bits(dtype: torch.dtype, storage: dict[str, Any]) -> None:
    found = []
    for path in NATIVE_PATHS:
        params = [Parameter(t.data.to(path.device)) for t in make(dtype)]
        optimizer = trained(params, path.make(params, **HYPER, **storage), steps=1)
        found.append((params[0].detach().double().cpu(), moments(optimizer, params[0])[0].cpu()))
    for p, m in found[1:]:
        assert (p != found[0][0]).double().mean() < 0.02 if dtype != torch.float32 else True
        assert (m != found[0][1]).double().mean() < 0.02


@over_paths(NATIVE_PATHS)
def test_a_tensor_that_skips_a_step_keeps_every_bit(path: Path) -> None:
    for dtype, storage in STORAGES:
        params = [Parameter(t.data.to(path.device)) for t in make(dtype)]
        optimizer = trained(params, path.make(params, **HYPER, **storage))
        before = {name: t.clone() for name, t in optimizer.state[params[0]].items()}, params[0].detach().clone()
        params[0].grad = torch.full_like(params[0], float("nan"))
        optimizer.step()
        assert torch.equal(params[0], before[1])
        changed = [name for name, t in optimizer.state[params[0]].items() if not torch.equal(t, before[0][name])]
        assert changed == ["skipped"]


@over_paths(NATIVE_PATHS)
def test_with_fp8_no_stepsize_exceeds_its_bound_also_if_a_variance_is_rounded_to_zero(path: Path) -> None:
    p = Parameter(torch.zeros(SIZE, device=path.device))
    optimizer = path.make([p], lr=1.0, eps=1e-14, state_precision="fp8", projections=0)
    for step in range(30):
        p.grad = noise((SIZE,), step).to(path.device)
        p.grad[1::2] *= 1e-7  # far below the smallest code of its block
        before, m = p.detach().clone(), moments(optimizer, p)[0] if step else torch.zeros(SIZE, device=path.device)
        optimizer.step()
        m_hat = (0.9 * m + 0.1 * p.grad.double()) / (1 - 0.9 ** (step + 1))
        bound = (1 - 0.999) ** 0.5 / 1e-14**0.5
        moved = (p.detach() - before).abs()
        assert (moved <= 1.001 * bound * m_hat.abs() + 1e-6 * before.abs()).all()


def total_movement(dtype: torch.dtype, **storage: Any) -> float:
    """Mean movement of weights around 1 that get the same gradient in 100 steps of lr 1e-4."""
    p = Parameter(torch.linspace(0.6, 1.4, SIZE).to(dtype))
    start = p.detach().double().mean()
    optimizer = Aida([p], lr=1e-4, eps=1e-16, projections=0, **storage)
    for step in range(100):
        p.grad = torch.full_like(p, 1.0 + 0.5 * (-1) ** step)
        optimizer.step()
    kept = optimizer.state[p].get("compensation", torch.zeros(()))
    return float(start - (p.detach().double() + kept).mean())


def test_bf16_weights_move_with_stochastic_rounding_or_a_kahan_sum_and_do_not_without() -> None:
    exact = total_movement(torch.float32)
    assert total_movement(torch.bfloat16) < 0.5 * exact
    assert total_movement(torch.bfloat16, stochastic_rounding=True) == pytest.approx(exact, rel=0.05)
    assert total_movement(torch.bfloat16, kahan_sum=True) == pytest.approx(exact, rel=0.05)


def test_the_seed_chooses_the_bits() -> None:
    found = []
    for seed in (0, 0, 1):
        params = make(torch.float32)
        found.append(trained(params, Aida(params, **HYPER, **FP8, rounding_seed=seed)))
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


# -- what is stored ------------------------------------------------------------------------------------


def stored_bytes(optimizer: Aida, p: Tensor) -> float:
    counters = ("step", "skipped")
    tensors = [t for name, t in optimizer.state[p].items() if name not in counters]
    return sum(t.numel() * t.element_size() for t in tensors) / p.numel()


def test_bytes_of_state_per_parameter() -> None:
    expected = {"float32": 8, "bfloat16": 4, "fp8": 2 + 2 / 128}
    for precision, size in expected.items():
        (p,) = params = make(torch.bfloat16, ((64, 256),))
        assert stored_bytes(trained(params, Aida(params, state_precision=precision)), p) == size
        optimizer = trained(params, Aida(params, state_precision=precision, kahan_sum=True))
        assert stored_bytes(optimizer, p) == size + 2


def test_small_tensors_double_precision_and_layers_that_end_within_a_block_keep_full_state() -> None:
    shapes = ((63, 65), (64, 64), (8, 600))
    params = [*make(torch.float32, shapes), *make(torch.float64, ((64, 128),)), *make(torch.complex64, ((64, 128),))]
    experts = {"params": [params.pop(2)], "layer_dims": 1}  # 600 elements are not whole blocks
    optimizer = Aida([{"params": params}, experts], **FP8)
    params.append(experts["params"][0])
    trained(params, optimizer)
    coded = ["exp_avg_codes" in optimizer.state[p] for p in params]
    assert coded == [False, True, False, False, False]


def test_a_weight_in_channels_last_has_blocks_in_memory_order_and_keeps_its_values_if_that_changes() -> None:
    p = Parameter(noise((32, 16, 3, 3), 0).to(memory_format=torch.channels_last))
    optimizer = trained([p], Aida([p], **HYPER, **FP8))
    before = moments(optimizer, p)
    p.data = p.data.contiguous()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    for mine, old, beta in zip(moments(optimizer, p), before, (0.9, 0.999), strict=True):
        assert ((mine - beta * old).abs() <= 0.4 * old.abs() + 0.01 * old.abs().max()).all()


@pytest.mark.parametrize(
    "layered", [{"layer_dims": 1}, {"split_sizes": (4, 4)}, {"split_sizes": (16, 16), "split_dim": 1}]
)
@over_paths(NATIVE_PATHS)
def test_layers_of_one_tensor_are_stored_as_tensors_of_their_own(path: Path, layered: dict[str, Any]) -> None:
    whole = noise((8, 32, 32), 0).bfloat16().to(path.device)
    p = Parameter(whole.clone())
    optimizer = path.make([{"params": [p], **layered}], **HYPER, **(FP8 | RANDOM))
    trained([p], optimizer)
    layers = layers_of(p, optimizer.param_groups[0])
    parts = layers.views(whole)
    assert len(parts) == layers.count
    for number, part in enumerate(parts):
        alone = Parameter(part.clone())
        single = path.make([alone], **HYPER)
        for step in range(4):
            grad = (0.1 * noise(tuple(p.shape), 100 * step)).to(p)
            alone.grad = layers.views(grad)[number].clone()
            single.step()
        # rounded stochastically, so close to full precision and not equal to it
        assert (layers.views(p.detach())[number].float() - alone.float()).abs().max() < 0.05


# -- checkpoints ---------------------------------------------------------------------------------------


def through_a_file(state_dict: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@EACH_STORAGE
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(dtype: torch.dtype, storage: dict[str, Any]) -> None:
    params = make(dtype)
    unbroken = trained(params, Aida(params, **HYPER, **storage))
    again = [Parameter(p.detach().clone()) for p in params]
    resumed = Aida(again, **HYPER, **storage)
    resumed.load_state_dict(through_a_file(unbroken.state_dict()))
    copied = copy.deepcopy(unbroken)
    for one, its in ((unbroken, params), (resumed, again), (copied, copied.param_groups[0]["params"])):
        trained(its, one, 4)
    assert same(unbroken, resumed)
    assert same(unbroken, copied)


@pytest.mark.parametrize(("before", "after"), list(permutations(("float32", "bfloat16", "fp8"), 2)))
@pytest.mark.parametrize("how", ["checkpoint", "group"])
def test_the_precision_of_the_state_can_change(before: str, after: str, how: str) -> None:
    params = make(torch.float32)
    optimizer = trained(params, Aida(params, **HYPER, state_precision=before))
    known = moments(optimizer, params[0])
    if how == "group":
        optimizer.param_groups[0]["state_precision"] = after
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.param_groups[0]["betas"] = (1 - 1e-9, 1 - 1e-9)  # a step that changes no moment
        optimizer.param_groups[0]["eps"] = 1e-36
    else:
        state_dict = through_a_file(optimizer.state_dict())
        optimizer = Aida(params, **HYPER, state_precision=after)
        optimizer.load_state_dict(state_dict)
        assert optimizer.param_groups[0]["state_precision"] == after
    if how == "group":
        optimizer.step()
    limit = {"float32": 1e-6, "bfloat16": 2**-7, "fp8": 0.14}[after]
    for mine, old in zip(moments(optimizer, params[0]), known, strict=True):
        assert ((mine - old).abs() <= limit * old.abs() + 2e-5 * old.abs().max()).all()


def test_a_float32_checkpoint_goes_into_8_bits_and_back() -> None:
    params = make(torch.float32)
    optimizer = trained(params, Aida(params, **HYPER))
    start = moments(optimizer, params[0])
    for _ in range(3):  # after the first rounding to nearest nothing changes any more
        for precision in ("fp8", "float32"):
            state_dict = optimizer.state_dict()
            optimizer = Aida(params, **HYPER, state_precision=precision)
            optimizer.load_state_dict(state_dict)
    for mine, old in zip(moments(optimizer, params[0]), start, strict=True):
        assert ((mine - old).abs() <= 0.14 * old.abs() + 1e-5 * old.abs().max()).all()


def test_codes_without_their_scales_are_refused() -> None:
    params = make(torch.float32)
    state_dict = trained(params, Aida(params, **FP8)).state_dict()
    del state_dict["state"][0]["exp_avg_scales"]
    with pytest.raises(ValueError, match="lacks exp_avg_scales"):
        Aida(params, **FP8).load_state_dict(state_dict)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"state_precision": "int8"}, "state_precision='int8' must be one of 'float32', 'bfloat16', 'fp8'"),
        ({"stochastic_rounding": True, "kahan_sum": True}, "cannot both be True"),
        ({"rounding_seed": -1}, "rounding_seed=-1 must be an integer"),
        ({"stochastic_rounding": 1}, "must be True or False"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Aida(make(torch.float32), **values)


# -- what is measured ----------------------------------------------------------------------------------


def test_the_probe_and_explain_read_8_bit_state_as_float32_state() -> None:
    found = {}
    for precision in ("float32", "bfloat16", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        optimizer = Aida(model.parameters(), lr=1e-3, eps=1e-8, state_precision=precision)
        probe = StepsizeProbe(optimizer, model.named_parameters(), every=1)
        for step in range(20):
            optimizer.zero_grad()
            model(noise((32, 64), step)).square().mean().backward()
            optimizer.step()
        assert probe.last is not None
        found[precision] = {layer.layer: (layer.mean, layer.max, layer.at_bound) for layer in probe.last.layers}
        text = explain(optimizer)
        assert ("storage" in text) == (precision != "float32")
    assert "fp8 state (2 tensors); float32 state (2 tensors)" in text
    for name, (mean, largest, at_bound) in found["float32"].items():
        for other in (found["bfloat16"][name], found["fp8"][name]):
            assert other[0] == pytest.approx(mean, rel=0.02)
            assert other[1] <= 1.02 * largest
            assert other[2] == pytest.approx(at_bound, abs=0.15)


def test_explain_does_not_count_updates_as_lost_that_rounding_keeps() -> None:
    for storage, counted in (({}, True), (RANDOM, False), (KAHAN, False)):
        params = make(torch.bfloat16)
        text = explain(trained(params, Aida(params, lr=1e-5, **storage)))
        assert ("lost updates" in text) == counted
