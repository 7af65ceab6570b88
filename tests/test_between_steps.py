"""What may happen between two steps: an optimizer that remembers the last one must see all of it."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.testing import assert_close

from aida import Aida
from paths import NATIVE_PATHS, Path, over_paths

Change = Callable[[Aida, list[Parameter]], None]


def swap_data(_: Aida, params: list[Parameter]) -> None:
    params[0].data = torch.full_like(params[0], 0.5)


def swap_data_in_another_layout(_: Aida, params: list[Parameter]) -> None:
    params[1].data = torch.full((4, 3), 0.5, device=params[1].device).t()


def replace_a_moment(optimizer: Aida, params: list[Parameter]) -> None:
    optimizer.state[params[0]]["exp_avg"] = torch.ones_like(params[0])


def write_into_a_moment(optimizer: Aida, params: list[Parameter]) -> None:
    optimizer.state[params[0]]["exp_avg_var"].fill_(2.0)


def forget_one_state(optimizer: Aida, params: list[Parameter]) -> None:
    del optimizer.state[params[1]]


def replace_the_state(optimizer: Aida, params: list[Parameter]) -> None:
    optimizer.state[params[2]] = {key: torch.ones_like(value) for key, value in optimizer.state[params[2]].items()}


def load_a_checkpoint(optimizer: Aida, _: list[Parameter]) -> None:
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] * 2
    optimizer.load_state_dict(saved)


def exchange_a_parameter(optimizer: Aida, params: list[Parameter]) -> None:
    params[0] = Parameter(torch.full_like(params[0], 0.25))
    optimizer.param_groups[0]["params"][0] = params[0]


def reverse_the_parameters(optimizer: Aida, params: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"].reverse()


def drop_a_parameter(optimizer: Aida, params: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"].pop()


def keep_a_note_in_the_state(optimizer: Aida, _: list[Parameter]) -> None:
    optimizer.state["note"] = 1  # type: ignore[index]


def clone_all_state(optimizer: Aida, _: list[Parameter]) -> None:
    """The widespread recipe for moving an optimizer to a device."""
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def clone_the_counters(optimizer: Aida, _: list[Parameter]) -> None:
    """A warm restart that puts new memory behind the counters."""
    for state in optimizer.state.values():
        state["step"].data = torch.zeros_like(state["step"])


def reset_the_counters_in_place(optimizer: Aida, _: list[Parameter]) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()
        state["skipped"].zero_()


def share_all_state(optimizer: Aida, _: list[Parameter]) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.share_memory_()


def send_the_state_dict_through_a_queue(optimizer: Aida, _: list[Parameter]) -> None:
    import torch.multiprocessing as mp

    queue = mp.get_context("spawn").SimpleQueue()
    queue.put(optimizer.state_dict())
    queue.get()


def turn_the_moments_around(optimizer: Aida, params: list[Parameter]) -> None:
    """The same values at another address, in another memory order."""
    for name in ("exp_avg", "exp_avg_var"):
        moment = optimizer.state[params[1]][name]
        moment.data = moment.data.t().contiguous().t()


def shorten_the_parameter(optimizer: Aida, params: list[Parameter]) -> None:
    """A smaller view at the same address, with state that fits it."""
    params[1].data = params[1].data[:2]
    for name in ("exp_avg", "exp_avg_var"):
        optimizer.state[params[1]][name].data = optimizer.state[params[1]][name].data[:2]


def put_betas_into_a_list(optimizer: Aida, _: list[Parameter]) -> None:
    optimizer.param_groups[0]["betas"] = [0.5, 0.9]


def change_the_list_of_betas(optimizer: Aida, params: list[Parameter]) -> None:
    """In place, in the step after :func:`put_betas_into_a_list`."""
    put_betas_into_a_list(optimizer, params)
    give_gradients(params, 9)
    optimizer.step()
    optimizer.param_groups[0]["betas"][0] = 0.25


def change_an_array_of_betas(optimizer: Aida, params: list[Parameter]) -> None:
    """In place: an array (of Python's own here, NumPy's as well) is neither a tuple nor a list."""
    optimizer.param_groups[0]["betas"] = array("d", [0.5, 0.9])
    give_gradients(params, 9)
    optimizer.step()
    optimizer.param_groups[0]["betas"][0] = 0.25


def put_other_memory_behind_lr(optimizer: Aida, params: list[Parameter]) -> None:
    optimizer.param_groups[0].update(capturable=True, lr=torch.tensor([0.5], device=params[0].device))
    give_gradients(params, 9)
    optimizer.step()
    optimizer.param_groups[0]["lr"].data = torch.tensor([0.25], device=params[0].device)


def set_value(key: str, value: Any) -> Change:
    def change(optimizer: Aida, _: list[Parameter]) -> None:
        optimizer.param_groups[0][key] = value

    change.__name__ = f"set_{key}"
    return change


CHANGES: list[Change] = [
    swap_data, swap_data_in_another_layout, replace_a_moment, write_into_a_moment, forget_one_state, replace_the_state,
    load_a_checkpoint, exchange_a_parameter, reverse_the_parameters, drop_a_parameter, keep_a_note_in_the_state,
    clone_all_state, clone_the_counters, reset_the_counters_in_place, share_all_state,
    send_the_state_dict_through_a_queue, turn_the_moments_around, shorten_the_parameter, put_betas_into_a_list,
    change_the_list_of_betas, change_an_array_of_betas, put_other_memory_behind_lr,
    set_value("lr", 0.5), set_value("betas", (0.5, 0.75)), set_value("eps", 1e-2), set_value("weight_decay", 0.5),
    set_value("projections", 5), set_value("decoupled_weight_decay", True), set_value("clip_norm", 0.1),
    set_value("nonfinite", "propagate"), set_value("maximize", True), set_value("lr", torch.tensor(0.5)),
]  # fmt: skip


def start(path: Path) -> tuple[Aida, list[Parameter]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5,), (3, 4), (2, 2, 2))
    params = [Parameter(torch.randn(shape, generator=generator).to(path.device)) for shape in shapes]
    return path.make(params, weight_decay=0.01), params


def give_gradients(params: list[Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def result(optimizer: Aida, params: list[Parameter]) -> list[Any]:
    return [[p.detach() for p in params], [dict(optimizer.state.get(p, {})) for p in params]]


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_between_steps_is_seen(path: Path, change: Change) -> None:
    if path.device == "cuda" and change is send_the_state_dict_through_a_queue:
        pytest.skip("the process that shares CUDA memory cannot receive it")
    remembering, params = start(path)
    forgetful, twins = start(path)
    for step in range(5):
        for optimizer, mine in ((remembering, params), (forgetful, twins)):
            if step == 2:
                if path.flags.get("foreach") and change.__name__ == "set_lr":
                    optimizer.param_groups[0]["capturable"] = True  # or a tensor lr is refused
                change(optimizer, mine)
            give_gradients(mine, step)
        forgetful._forget()
        remembering.step()
        forgetful.step()
    assert_close(result(remembering, params), result(forgetful, twins), rtol=0, atol=0)


@over_paths(NATIVE_PATHS)
def test_path_can_be_changed_between_steps(path: Path) -> None:
    optimizer, params = start(path)
    judge, twins = start(path)
    judge.param_groups[0].update(foreach=False, fused=False)
    for step, flags in enumerate([path.flags, {"foreach": True}, {"foreach": False}, {}, path.flags]):
        optimizer.param_groups[0].update({"foreach": None, "fused": None, **flags})
        for stepper, mine in ((optimizer, params), (judge, twins)):
            give_gradients(mine, step)
            stepper.step()
    assert_close(result(optimizer, params), result(judge, twins))


@over_paths(NATIVE_PATHS)
def test_gradients_may_come_and_go_and_lie_anyhow(path: Path) -> None:
    optimizer, params = start(path)
    judge, twins = start(path)

    def present(step: int, index: int) -> bool:
        return (step + index) % 3 != 0

    def layout(step: int, grad: Tensor) -> Tensor:
        if step % 2 and grad.ndim == 2:
            return grad.t().contiguous().t()
        return grad.reshape(-1)[0].expand(grad.shape) if step % 5 == 4 else grad

    for step in range(10):
        give_gradients(params, step)
        give_gradients(twins, step)
        for index, (p, q) in enumerate(zip(params, twins, strict=True)):
            q.grad = layout(step, q.grad).contiguous() if present(step, index) else None
            p.grad = layout(step, p.grad) if present(step, index) else None
        judge._forget()
        optimizer.step()
        judge.step()
    assert_close(result(optimizer, params), result(judge, twins))
    assert len({int(optimizer.state[p]["step"]) for p in params}) == 2


@over_paths(NATIVE_PATHS)
def test_one_gradient_may_serve_two_parameters(path: Path) -> None:
    params = [Parameter(torch.ones(3, device=path.device)) for _ in range(4)]
    twins = [Parameter(torch.ones(3, device=path.device)) for _ in range(4)]

    def grouped(mine: list[Parameter]) -> list[dict[str, Any]]:
        return [{"params": mine[:2]}, {"params": mine[2:], "foreach": False, "fused": False}]

    optimizer, judge = path.make(grouped(params)), path.make(grouped(twins))
    for step in range(3):
        grad = torch.randn(3, device=path.device)
        for p, q in zip(params, twins, strict=True):
            p.grad, q.grad = grad, grad.clone()
        optimizer.step()
        judge.step()
        assert optimizer.state[params[3]]["step"].item() == step + 1
    assert_close([p.detach() for p in params], [q.detach() for q in twins])


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("kwargs", [{}, {"clip_norm": 0.1}, {"nonfinite": "raise"}], ids=["plain", "clip", "raise"])
def test_no_gradient_outlives_zero_grad(path: Path, transposed: bool, kwargs: dict[str, Any]) -> None:
    p = Parameter(torch.ones(4, 3, device=path.device))
    optimizer = path.make([p], **kwargs)
    for _ in range(2):
        p.grad = torch.ones(3, 4, device=path.device).t() if transposed else torch.ones(4, 3, device=path.device)
        grad = weakref.ref(p.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        assert grad() is None


@over_paths()
def test_a_one_by_one_convolution_is_contiguous_and_channels_last_at_once(path: Path) -> None:
    """Its strides differ where they mean nothing: no copy is due, and the result is that of a contiguous one."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        generator = torch.Generator().manual_seed(0)
        param = torch.randn(6, 4, 1, 1, generator=generator).to(path.device).to(memory_format=layout).requires_grad_()
        optimizer = path.make([param], lr=0.1)
        for _ in range(3):
            param.grad = torch.randn(6, 4, 1, 1, generator=generator).to(path.device)
            optimizer.step()
        results.append(param.detach().clone())
    torch.testing.assert_close(*results, rtol=0, atol=0)


@over_paths()
def test_gradients_negative_or_conjugate_by_a_mark_are_read_as_what_they_are(path: Path) -> None:
    def run(plain: bool) -> list[Any]:
        real, imaginary = (Parameter(torch.full((1,), value, device=path.device)) for value in (1.0, 2.0))
        number = Parameter(torch.ones(3, device=path.device, dtype=torch.complex64))
        # apart: with complex numbers nothing is remembered
        optimizers = [path.make([real, imaginary]), path.make([number])]
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (torch.complex(real, imaginary).conj() ** 2 * (1 + step + 2j)).imag.sum().backward()
            (number.conj() * (1 + step + 3j)).imag.sum().backward()
            assert imaginary.grad.is_neg()
            assert number.grad.is_conj()
            if plain or step % 3 == 1:  # so that the mark comes and goes
                imaginary.grad, number.grad = imaginary.grad.resolve_neg(), number.grad.resolve_conj()
            for optimizer in optimizers:
                optimizer.step()
        return [[p.detach(), dict(o.state[p])] for o in optimizers for p in o.param_groups[0]["params"]]

    assert_close(run(plain=False), run(plain=True), rtol=0, atol=0)


@over_paths()
def test_a_gradient_turns_lazily_negative_after_plain_ones(path: Path) -> None:
    def run(lazy: bool) -> list[Any]:
        optimizer, params = start(path)
        for step in range(4):
            give_gradients(params, step)
            if step >= 2:
                params[1].grad = torch._neg_view(params[1].grad) if lazy else -params[1].grad
            optimizer.step()
        return result(optimizer, params)

    assert_close(run(lazy=True), run(lazy=False), rtol=0, atol=0)


@over_paths(NATIVE_PATHS)
def test_gradients_of_a_step_that_raised_do_not_outlive_zero_grad(path: Path) -> None:
    p = Parameter(torch.ones(4, 3, device=path.device))
    optimizer = path.make([p], nonfinite="raise")
    for value in (1.0, float("nan")):
        p.grad = torch.full_like(p, value)
        grad = weakref.ref(p.grad)
        try:
            optimizer.step()
        except RuntimeError:
            assert value != value
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        assert grad() is None


@over_paths()
def test_complex_numbers_may_come_to_lie_in_another_order(path: Path) -> None:
    params = [Parameter(torch.ones(3, 4, device=path.device, dtype=torch.complex64)) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    optimizers = [path.make([p]) for p in params]
    for step in range(4):
        if step == 2:
            params[0].data = params[0].data.t().contiguous().t()
        grad = torch.randn(3, 4, generator=generator, dtype=torch.complex64).to(path.device)
        for p, optimizer in zip(params, optimizers, strict=True):
            p.grad = grad
            optimizer.step()
    assert_close(*(result(each, [p]) for each, p in zip(optimizers, params, strict=True)))
