"""The fused CPU path: its agreement with the literal algorithm, and what only a kernel can get wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from aida import Aida
from aida.backends import Backend, cpu, library
from aida.backends.choice import Route
from aida.backends.foreach import Foreach
from cpu_runs import (
    HYPER,
    REFERENCE,
    STEPS,
    VARIANTS,
    Gradient,
    assert_close,
    assert_identical,
    gradient,
    parameters,
    run,
    tensors,
)

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C kernel was not built")


@pytest.fixture(autouse=True)
def _threads() -> None:
    """One thread unless a test asks for more: on a busy machine the reference waits longer than it computes."""
    torch.set_num_threads(1)


class AidaAtLevel(Aida):
    """Aida on the kernels of one instruction set."""

    level: int

    def _backend(self, route: Route) -> Backend:
        return self._backends.setdefault(route, cpu.Cpu(self.level))


def at_level(level: int, params: list[Parameter], **values: Any) -> AidaAtLevel:
    optimizer = AidaAtLevel(params, **values)
    optimizer.level = level
    return optimizer


def instruction_sets() -> list[int]:
    built = library.library()
    return list(range(built.levels)) if built is not None else []


# -- agreement with the literal algorithm ----------------------------------------------------------


@pytest.mark.parametrize("projections", range(6))
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_agrees_with_the_literal_algorithm(variant: str, projections: int) -> None:
    values = {**HYPER, **VARIANTS[variant], "projections": projections}
    found = run(Aida(parameters(), **values, fused=True))
    assert [type(backend) for backend in found._backends.values()] == [cpu.Cpu]
    assert_close(found, run(Aida(parameters(), **values, **REFERENCE)), 1e-12)


@pytest.mark.parametrize("level", instruction_sets())
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instruction_set_agrees_with_float64(variant: str, level: int) -> None:
    values = {**HYPER, **VARIANTS[variant]}
    wanted = run(Aida(parameters(), **values, **REFERENCE), steps=20)
    # float32 loses a rounding a step in p, and in v the digits of inner products summed in float32
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-5)):
        assert_close(run(at_level(level, parameters(dtype), **values), steps=20), wanted, tolerance)


@pytest.mark.parametrize("level", instruction_sets())
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_computes_in_float32_and_rounds_once(dtype: torch.dtype, variant: str, level: int) -> None:
    values = {**HYPER, **VARIANTS[variant]}
    found = at_level(level, parameters(dtype), **values)
    wanted = Aida(parameters(dtype), **values, **REFERENCE)
    for step in range(6):
        run(wanted, 1, lambda _, index, p, step=step: gradient(step, index, p))
        run(found, 1, lambda _, index, p, step=step: gradient(step, index, p))
        for name, judges in tensors(wanted).items():
            for mine, judge in zip(tensors(found)[name], judges, strict=True):
                assert mine.dtype == (dtype if name == "param" else torch.float32)
                # two float32 results that differ in their last digits may fall to two neighbours
                last_place = torch.finfo(dtype).eps if name == "param" else 1e-4
                excess = (mine.double() - judge.double()).abs() - last_place * judge.double().abs()
                assert not (excess > 1e-7).any(), f"{name} of shape {tuple(judge.shape)} in step {step}"
                mine.copy_(judge)  # else the difference grows with the steps


@pytest.mark.parametrize("level", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_stored_number_is_read_and_rounded_to_nearest_even(dtype: torch.dtype, level: int) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    p = Parameter(every.clone())
    optimizer = at_level(level, [p], lr=0.25, weight_decay=0.75, decoupled_weight_decay=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    # a zero gradient leaves the decay alone: 0.8125 p has four bits more than p, ties among them
    assert torch.equal(p.detach(), (every.float() - 0.1875 * every.float()).to(dtype))


@pytest.mark.parametrize("level", instruction_sets())
def test_a_float16_parameter_beyond_the_largest_number_becomes_infinite(level: int) -> None:
    largest = torch.finfo(torch.float16).max
    for lr, expected in ((8.0, largest), (64.0, float("inf"))):
        p = Parameter(torch.full((40,), largest, dtype=torch.float16))
        optimizer = at_level(level, [p], lr=lr, maximize=True, projections=0)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert torch.equal(p.detach(), torch.full_like(p, expected)), lr


def test_groups_keep_their_own_values() -> None:
    def build(**flags: bool) -> Aida:
        params = parameters()
        return Aida(
            [
                {"params": params[:3], "lr": 3e-3, "projections": 1},
                {"params": params[3:4], "clip_norm": 0.01},
                {
                    "params": params[4:7],
                    "betas": (0.5, 0.9),
                    "weight_decay": 0.1,
                    "decoupled_weight_decay": False,
                    "maximize": True,
                },
                {"params": params[7:], "eps": 1e-6, "weight_decay": 0.1, "decoupled_weight_decay": True, "xi": 1e-3},
            ],
            **HYPER,
            **flags,
        )

    assert_close(run(build(fused=True)), run(build(**REFERENCE)), 1e-12)


def test_a_parameter_whose_gradient_comes_late_counts_its_own_steps() -> None:
    def late(step: int, index: int, p: Tensor) -> Tensor | None:
        return None if (step < 7 * index or step % 5 == index) else gradient(step, index, p)

    found = run(Aida(parameters(), **HYPER, fused=True), grads=late)
    assert_close(found, run(Aida(parameters(), **HYPER, **REFERENCE), grads=late), 1e-12)
    assert len({float(step) for step in tensors(found)["step"]}) > 3


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.05, 1e3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_clip_norm_equals_clipping_before_the_step(clip_norm: float, weight_decay: float) -> None:
    values = {**HYPER, "weight_decay": weight_decay, "decoupled_weight_decay": False}
    found = run(Aida(parameters(), **values, clip_norm=clip_norm, fused=True))
    wanted = Aida(parameters(), **values, **REFERENCE)
    params = wanted.param_groups[0]["params"]
    for step in range(STEPS):
        for index, p in enumerate(params):
            p.grad = gradient(step, index, p.detach())
        torch.nn.utils.clip_grad_norm_(params, clip_norm)
        wanted.step()
    assert_close(found, wanted, 1e-12)


def test_the_clipped_norm_spans_every_batch_of_the_step() -> None:
    def build(**flags: bool) -> Aida:
        return Aida(parameters() + parameters(torch.float32), **HYPER, clip_norm=0.05, **flags)

    assert_close(run(build(fused=True)), run(build(**REFERENCE)), 3e-5)


# -- NaN, inf and mixed precision ------------------------------------------------------------------


def spoilt(bad: float, where: int) -> Gradient:
    """The gradients with one bad element, in every third step, in the tensor at ``where``."""

    def grads(step: int, index: int, p: Tensor) -> Tensor:
        grad = gradient(step, index, p)
        if index == where and step % 3 == 2:
            grad.view(-1)[-1] = bad
        return grad

    return grads


@pytest.mark.parametrize("dtype", list(cpu.STORAGE), ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_tensor_with_a_nonfinite_gradient_sits_the_step_out(
    dtype: torch.dtype, bad: float, clip_norm: float | None
) -> None:
    values = {**HYPER, "weight_decay": 0.1, "decoupled_weight_decay": False, "clip_norm": clip_norm}
    found = run(Aida(parameters(dtype), **values, fused=True), steps=9, grads=spoilt(bad, where=6))
    wanted = run(Aida(parameters(dtype), **values, **REFERENCE), steps=9, grads=spoilt(bad, where=6))
    assert_close(found, wanted, 1e-12 if dtype == torch.float64 else max(1e-5, torch.finfo(dtype).eps))
    assert found.skipped() == {"0.6": 3}
    assert float(tensors(found)["step"][6]) == 6


def test_propagate_computes_on_with_nan() -> None:
    found = run(Aida(parameters(), **HYPER, nonfinite="propagate", fused=True), 3, spoilt(float("nan"), where=5))
    assert tensors(found)["param"][5].isnan().all()
    assert all(p.isfinite().all() for index, p in enumerate(tensors(found)["param"]) if index != 5)
    assert not found.skipped()


def test_raise_names_the_tensor_before_anything_changed() -> None:
    optimizer = Aida(parameters(), **HYPER, nonfinite="raise", fused=True)
    with pytest.raises(RuntimeError, match=r"0\.5"):
        run(optimizer, 3, spoilt(float("nan"), where=5))
    assert_identical(optimizer, run(Aida(parameters(), **HYPER, fused=True), 2))  # the good steps before


def test_the_loss_scale_is_taken_out_of_the_gradient() -> None:
    def scaled(step: int, index: int, p: Tensor) -> Tensor:
        return 1024 * gradient(step, index, p)

    for values in ({}, {"clip_norm": 0.05}, {"weight_decay": 0.1, "decoupled_weight_decay": False}):
        found = Aida(parameters(torch.float32), **HYPER, **values, fused=True)
        found.grad_scale = torch.tensor(1024.0)
        found.found_inf = torch.tensor(0.0)
        # by a power of two, which no rounding sees
        assert_identical(run(found, 5, scaled), run(Aida(parameters(torch.float32), **HYPER, **values, fused=True), 5))


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_step_whose_gradients_overflowed_changes_and_counts_nothing(clip_norm: float | None) -> None:
    optimizer = run(Aida(parameters(), **HYPER, clip_norm=clip_norm, fused=True), steps=3)
    wanted = run(Aida(parameters(), **HYPER, clip_norm=clip_norm, fused=True), steps=3)
    optimizer.found_inf = torch.tensor(1.0)
    run(optimizer, 2, spoilt(float("inf"), where=4))
    assert_identical(optimizer, wanted)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_gradients_stay_as_received(values: dict[str, Any]) -> None:
    optimizer = Aida(parameters(torch.float32), **{**HYPER, **values}, fused=True)
    params = optimizer.param_groups[0]["params"]
    for index, p in enumerate(params):
        p.grad = gradient(0, index, p.detach())
    received = [(p.grad, p.grad.clone()) for p in params]
    optimizer.step()
    for p, (grad, copy) in zip(params, received, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, copy)


def test_gradients_of_another_layout_count_element_by_element() -> None:
    def turned(step: int, index: int, p: Tensor) -> Tensor:
        grad = gradient(step, index, p)
        return grad.mT.contiguous().mT if p.ndim == 2 else grad.contiguous()

    found = run(Aida(parameters(), **HYPER, fused=True), grads=turned)
    assert_identical(found, run(Aida(parameters(), **HYPER, fused=True)))


def test_the_moments_follow_a_parameter_into_another_layout() -> None:
    optimizer = run(Aida(parameters(), **HYPER, fused=True), 3)
    for p in optimizer.param_groups[0]["params"]:
        if p.ndim == 4:
            p.data = p.data.contiguous()
    wanted = run(Aida(parameters(), **HYPER, **REFERENCE), 3)
    assert_close(run(optimizer, 5), run(wanted, 5), 1e-12)


def test_a_parameter_with_holes_takes_the_foreach_path() -> None:
    p = Parameter(torch.randn(8, 6)[:, ::2])
    assert not cpu.fits(p, torch.zeros_like(p))
    assert cpu.fits(Parameter(torch.randn(8, 6).T), torch.zeros(6, 8))
    assert not cpu.fits(Parameter(torch.randn(3)), torch.zeros(3, dtype=torch.float64))
    optimizer = Aida([p], fused=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert [type(backend) for backend in optimizer._backends.values()] == [Foreach]


def test_tensors_without_elements_count_their_steps() -> None:
    optimizer = run(Aida(parameters(shapes=((0,), (3, 0))), **HYPER, fused=True), steps=3)
    assert [float(step) for step in tensors(optimizer)["step"]] == [3, 3]
    assert not optimizer.skipped()


def test_a_graph_that_saved_the_old_parameter_refuses_its_backward() -> None:
    p = Parameter(torch.randn(5))
    optimizer = Aida([p], fused=True)
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- threads ---------------------------------------------------------------------------------------

#: Many blocks of the kernel's work, some of them across tensors.
LARGE_SHAPES: tuple[tuple[int, ...], ...] = ((70_001,), (3,), (400_000,), (8, 9), (1000, 301), (129,), (65_536,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", [{}, {"clip_norm": 0.1, "weight_decay": 0.1}], ids=["one-call", "two-calls"])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, values: dict[str, Any]) -> None:
    runs = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        runs.append(run(Aida(parameters(dtype, LARGE_SHAPES), **HYPER, **values, fused=True), steps=4))
    for other in runs[1:]:
        assert_identical(other, runs[0])


def test_both_phases_in_one_call_equal_the_two_calls() -> None:
    def build(nonfinite: Any) -> Aida:
        return run(Aida(parameters(torch.float32, LARGE_SHAPES), **HYPER, nonfinite=nonfinite, fused=True), steps=4)

    assert_identical(build("propagate"), build("raise"))  # "raise" must know between the phases


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel has one thread")
def test_the_kernel_works_in_torchs_own_threads() -> None:
    program = """
import os, torch
from aida import Aida
torch.set_num_threads(3)
torch.randn(1 << 20).exp_()  # torch starts its threads
tasks = lambda: set(os.listdir("/proc/self/task"))
def ticks(task):
    with open(f"/proc/self/task/{task}/stat") as stat:
        return sum(map(int, stat.read().rsplit(")", 1)[1].split()[11:13]))
before = tasks()
p = torch.nn.Parameter(torch.randn(1 << 22))
p.grad = torch.randn(1 << 22)
optimizer = Aida([p], fused=True)
spent = {task: ticks(task) for task in before}
for _ in range(40):
    optimizer.step()
assert tasks() == before, "the kernel started threads of its own"
assert sum(ticks(task) > spent[task] for task in before) >= 3, "the kernel did not use torch's threads"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# -- where there is no kernel ----------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["missing", "broken", "foreign"])
def test_without_a_usable_kernel_the_foreach_path_runs(
    spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "_cpu.so"
    broken.write_bytes(b"not a shared object")
    foreign = importlib.util.find_spec("math")  # loads, or is built in; exports nothing of ours
    specs = {"missing": None, "broken": SimpleNamespace(origin=str(broken)), "foreign": foreign}
    monkeypatch.setattr(library, "find_spec", lambda name: specs[spec])
    library.library.cache_clear()
    library.describer.cache_clear()
    try:
        assert not cpu.available()
        optimizer = run(Aida(parameters(), **HYPER), steps=1)
        assert [type(backend) for backend in optimizer._backends.values()] == [Foreach]
        with pytest.raises(RuntimeError, match="foreach"):
            run(Aida(parameters(), **HYPER, fused=True), steps=1)
        with pytest.raises(RuntimeError, match="available"):
            cpu.Cpu()
    finally:
        library.library.cache_clear()
        library.describer.cache_clear()
