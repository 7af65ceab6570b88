"""State in fewer bits, stochastic rounding and Kahan sums: every path against the plain one with the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from aida import Aida
from aida._step import sorting
from aida._step.layers import layers_of
from aida._step.state import MOMENTS, layer_states
from aida._step.storage import Stream
from aida.backends import Backend, cpu, library
from aida.backends.choice import Route
from aida.backends.widened import Widened
from cpu_runs import HYPER, VARIANTS, error, gradient, parameters, run
from paths import NATIVE_PATHS, REFERENCE, Path, over_paths

#: Whole blocks and not, more than one chunk of the C kernel, and too small for 8-bit state.
SHAPES: tuple[tuple[int, ...], ...] = ((128, 40), (5001,), (130,), (4, 33, 8, 5))

ROUNDINGS: dict[str, dict[str, Any]] = {
    "nearest": {}, "stochastic": {"stochastic_rounding": True}, "kahan": {"kahan_sum": True}
}  # fmt: skip
STORAGES = [
    pytest.param(dtype, {"state_precision": state, **values}, id=f"{str(dtype)[6:]}-{state}-{rounding}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for state in ("float32", "bfloat16", "fp8")
    for rounding, values in ROUNDINGS.items()
    if (state, rounding) != ("float32", "nearest") and (dtype != torch.float32 or rounding == "nearest")
]
over_storages = pytest.mark.parametrize(("dtype", "storage"), STORAGES)
#: One of each kind of rounding, for tests whose subject is not the arithmetic.
FEW_STORAGES = [
    pytest.param(torch.float32, {"state_precision": "fp8"}, id="fp8"),
    pytest.param(torch.bfloat16, {"state_precision": "bfloat16", "stochastic_rounding": True}, id="stochastic"),
    pytest.param(torch.bfloat16, {"state_precision": "fp8", "kahan_sum": True}, id="kahan"),
]
over_few_storages = pytest.mark.parametrize(("dtype", "storage"), FEW_STORAGES)
#: The judge is the reference path on float32 copies.
JUDGED = [path for path in NATIVE_PATHS if not path.name.endswith("reference")]
needs_kernel = pytest.mark.skipif(not cpu.available(), reason="the C kernel was not built")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(path: Path, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = SHAPES, **values: Any) -> Aida:
    params = [Parameter(p.detach().to(path.device)) for p in parameters(dtype, shapes)]
    return path.make(params, **{**HYPER, **values})


def judge(found: Aida, **values: Any) -> Aida:
    """The plain path on copies of the parameters."""
    params = [Parameter(p.detach().clone()) for p in found.param_groups[0]["params"]]
    return Aida(params, **{**HYPER, **values}, **REFERENCE)


def moments_of(optimizer: Aida, p: Tensor) -> dict[str, Tensor]:
    """The moments of a parameter that is one layer, as numbers."""
    group = optimizer.param_groups[0]
    (state,) = layer_states(optimizer.state[p], p, layers_of(p, group), group)
    return {name: state[name].float() for name in MOMENTS}


def few(differ: Tensor) -> bool:
    """A contracted multiplication and addition may move a number across the point where its rounding changes."""
    return int(differ.sum()) <= max(1, differ.numel() / 1000)


def places(t: Tensor) -> Tensor:
    """Stored numbers as integers that count the places between them; both zeros are 0, all NaN the same."""
    bits, sign = (t.int(), 0x80) if t.dtype == torch.uint8 else (t.view(torch.int16).int() & 0xFFFF, 0x8000)
    magnitude = bits & (sign - 1)
    nan = magnitude == 0x7F if t.dtype == torch.uint8 else t.isnan()
    return torch.where(nan, 2 * sign, torch.where(bits >= sign, -magnitude, magnitude))


def stored(optimizer: Aida) -> dict[tuple[str, int], Tensor]:
    """Parameters and state, by name and the parameter's index."""
    found = {}
    for index, p in enumerate(optimizer.param_groups[0]["params"]):
        for name, value in {"param": p.detach(), **optimizer.state[p]}.items():
            found[name, index] = value
    return found


def assert_agree(found: Aida, wanted: Aida) -> None:
    """After one step from the same state. Then copy the state, or differences would grow."""
    mine, theirs = stored(found), stored(wanted)
    assert mine.keys() == theirs.keys()
    for (name, index), value in mine.items():
        known, where = theirs[name, index].to(value.device), f"{name} {index}"
        if name == "compensation":  # small against the parameter, so its last digits are its neighbour's
            total, judged = (
                (t["param", index].cpu().double() + t[name, index].cpu().double()).nan_to_num() for t in (mine, theirs)
            )
            assert (total - judged).abs().le(2e-5 * judged.abs() + 1e-7).all(), where
        elif name.endswith("scales"):
            assert torch.equal(value, known), where
        elif value.dtype == torch.float32:
            assert torch.equal(value.isnan(), known.isnan()), where
            assert error(value.nan_to_num(), known.nan_to_num()) <= 1e-6, where
        else:
            apart = (places(value) - places(known)).abs()
            assert few(apart > 0), where
            if value.dtype != torch.uint8:  # what cancels to almost 0 may be several of its tiny units away
                apart[(value.double() - known.double()).abs() <= 1e-7 * known.nan_to_num().abs().max()] = 0
            assert not (apart > 1).any(), where
    for key, value in mine.items():
        value.copy_(theirs[key])


def assert_same_bits(found: Aida, wanted: Aida) -> None:
    mine, theirs = stored(found), stored(wanted)
    for key, value in mine.items():
        kind = torch.uint8 if value.dtype == torch.uint8 else torch.int16 if value.element_size() == 2 else torch.int32
        assert torch.equal(value.view(kind), theirs[key].view(kind)), key


def take_together(found: Aida, wanted: Aida, steps: int = 3, grads: Any = gradient) -> None:
    for step in range(steps):
        for optimizer in (found, wanted):
            run(optimizer, 1, lambda _, index, p, step=step: grads(step, index, p))
        assert_agree(found, wanted)


class AidaAtLevel(Aida):
    """Aida on the C kernels of one instruction set."""

    level: int

    def _backend(self, route: Route) -> Backend:
        return self._backends.setdefault(route, cpu.Cpu(self.level))


# -- agreement with the plain path -----------------------------------------------------------------


@over_paths(JUDGED)
@over_storages
def test_every_path_rounds_as_the_plain_one(path: Path, dtype: torch.dtype, storage: dict[str, Any]) -> None:
    for variant in VARIANTS.values():
        found = build(path, dtype, **storage, **variant)
        take_together(found, judge(found, **storage, **variant), 2)
        wrapped = [b._backend if isinstance(b, Widened) else b for b in found._backends.values()]
        assert {type(backend) for backend in wrapped} == {path.backend}


@over_paths(JUDGED)
@over_few_storages
def test_twenty_steps_stay_close_to_the_plain_path(path: Path, dtype: torch.dtype, storage: dict[str, Any]) -> None:
    found = build(path, dtype, **storage)
    wanted = run(judge(found, **storage), steps=20)
    run(found, steps=20)
    for mine, theirs in zip(found.param_groups[0]["params"], wanted.param_groups[0]["params"], strict=True):
        assert error(mine.detach().cpu(), theirs.detach().cpu()) <= 1e-4
        moments, judged = moments_of(found, mine), moments_of(wanted, theirs)
        for name, moment in moments.items():
            # one element in a thousand may round to the neighbour in each step: 1/16 of it away in 8 bits
            assert error(moment.cpu(), judged[name].cpu()) <= 0.02, name


@over_paths(JUDGED)
@over_few_storages
def test_layers_of_a_tensor_have_their_own_steps_blocks_and_bits(
    path: Path, dtype: torch.dtype, storage: dict[str, Any]
) -> None:
    for shape, layers in (((5, 9, 128), {"layer_dims": 1}), ((96, 64), {"split_sizes": (64, 20, 12)})):
        found = build(path, dtype, (shape, (6, 7)), **storage)
        found.param_groups[0].update(layers)
        wanted = judge(found, **storage)
        wanted.param_groups[0].update(layers)
        for optimizer in (found, wanted):  # a group of its own: the layers do not fit
            small = optimizer.param_groups[0]["params"].pop()
            optimizer.add_param_group({"params": [small], "layer_dims": 0, "split_sizes": None})

        def late(step: int, index: int, p: Tensor) -> Tensor:
            grad = gradient(step, index, p)
            if step == 1 and p.ndim == len(shape):  # noqa: B023
                grad.view(-1)[0] = float("nan")  # the first layer counts fewer steps than the others
            return grad

        take_together(found, wanted, 4, late)
        p = found.param_groups[0]["params"][0]
        assert found.state[p]["step"].flatten()[0] == 3
        assert (found.state[p]["step"].flatten()[1:] == 4).all()


@over_paths(JUDGED)
@over_few_storages
@pytest.mark.parametrize("stream", [Stream(5, 99, 50, 170), Stream(2**32 - 1, (3 << 40) - 70, 1 << 30, 0)], ids=str)
def test_random_bits_follow_the_elements_of_a_shard(
    path: Path, dtype: torch.dtype, storage: dict[str, Any], stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "stream_of", lambda p, number, seed: stream)
    found = build(path, dtype, **storage)
    take_together(found, judge(found, **storage))


@over_paths(JUDGED)
@over_few_storages
def test_nan_stays_in_its_element_without_projections(path: Path, dtype: torch.dtype, storage: dict[str, Any]) -> None:
    values = {**storage, "projections": 0, "nonfinite": "propagate"}
    found = build(path, dtype, **values)

    def spoilt(step: int, index: int, p: Tensor) -> Tensor:
        grad = gradient(step, index, p)
        if step > 0:
            grad[(-1,) * grad.ndim] = float("nan")
        return grad

    take_together(found, judge(found, **values), 3, spoilt)
    for p in found.param_groups[0]["params"]:
        for value in (p.detach(), *moments_of(found, p).values()):
            assert value.isnan().sum() == 1


@over_paths(NATIVE_PATHS)
@over_few_storages
def test_state_follows_a_parameter_into_another_memory_format(
    path: Path, dtype: torch.dtype, storage: dict[str, Any]
) -> None:
    shape = ((4, 33, 8, 5),)
    found = run(build(path, dtype, shape, **storage), 3)
    (p,) = found.param_groups[0]["params"]
    before = {name: moment.clone() for name, moment in moments_of(found, p).items()}
    p.data = p.data.contiguous()
    found.param_groups[0]["betas"] = (1 - 1e-7, 1 - 1e-7)
    run(found, 1)
    for name, moment in moments_of(found, p).items():
        assert error(moment, before[name]) <= 0.06, name  # codes of other blocks are rounded again


# -- what must not change --------------------------------------------------------------------------


@over_paths(NATIVE_PATHS)
@over_few_storages
def test_a_resumed_run_has_the_same_bits(path: Path, dtype: torch.dtype, storage: dict[str, Any]) -> None:
    found = run(build(path, dtype, **storage), steps=3)
    params = [Parameter(p.detach().clone()) for p in found.param_groups[0]["params"]]
    resumed = path.make(params, **HYPER, **storage)
    resumed.load_state_dict(copy.deepcopy(found.state_dict()))
    assert_same_bits(run(resumed, 3), run(found, 3))


@over_paths(NATIVE_PATHS)
@over_few_storages
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_a_tensor_that_skips_a_step_is_not_touched(
    path: Path, dtype: torch.dtype, storage: dict[str, Any], clip_norm: float | None
) -> None:
    found = run(build(path, dtype, **storage, clip_norm=clip_norm), steps=2)
    before = {key: value.clone() for key, value in stored(found).items()}

    def spoilt(step: int, index: int, p: Tensor) -> Tensor:
        grad = gradient(step, index, p)
        if index < 2:
            grad.view(-1)[-1] = float("inf")
        return grad

    run(found, 1, spoilt)
    assert found.skipped() == {"0.0": 1, "0.1": 1}
    for (name, index), value in stored(found).items():
        if name == "param" or "avg" in name:
            assert torch.equal(value, before[name, index]) or index >= 2, (name, index)
    assert not torch.equal(stored(found)["param", 3], before["param", 3])
    after = {key: value.clone() for key, value in stored(found).items()}
    found.found_inf = torch.tensor(1.0, device=path.device)
    run(found, 1)
    assert all(torch.equal(value, after[key]) for key, value in stored(found).items())


@over_paths(NATIVE_PATHS)
def test_tensors_without_elements_count_their_steps(path: Path) -> None:
    found = run(build(path, torch.bfloat16, ((0,), (3, 0)), stochastic_rounding=True), steps=3)
    assert [float(found.state[p]["step"]) for p in found.param_groups[0]["params"]] == [3, 3]


# -- what only the C kernel can get wrong ----------------------------------------------------------


def at_level(level: int, dtype: torch.dtype, **values: Any) -> Aida:
    optimizer = AidaAtLevel(parameters(dtype, SHAPES), **{**HYPER, **values})
    optimizer.level = level
    return optimizer


@needs_kernel
@over_storages
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype, storage: dict[str, Any]) -> None:
    (built,) = [library.library()]
    assert built is not None
    for name in ("plain", "clip-l2", "no-momentum"):
        runs = [run(at_level(level, dtype, **storage, **VARIANTS[name]), 3) for level in range(built.levels)]
        for other in runs[1:]:
            same_form = [i for i, p in enumerate(SHAPES) if storage["state_precision"] != "fp8" or i != 2]
            mine, theirs = stored(other), stored(runs[0])
            for key, value in mine.items():
                if key[1] in same_form:  # tensors in full precision are contracted
                    assert torch.equal(value.double(), theirs[key].double()), (name, key)


@needs_kernel
@over_few_storages
@pytest.mark.parametrize("values", [{}, {"clip_norm": 0.1, "weight_decay": 0.1}], ids=["one-call", "two-calls"])
def test_the_number_of_threads_changes_no_bit(
    dtype: torch.dtype, storage: dict[str, Any], values: dict[str, Any]
) -> None:
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        shapes = ((70_001,), (300, 301), (129,))
        runs.append(run(Aida(parameters(dtype, shapes), **HYPER, **storage, **values, fused=True), steps=3))
    assert_same_bits(*runs)
