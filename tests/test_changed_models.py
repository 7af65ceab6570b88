"""A model that changed after steps were taken: refused in words, on every path.

Fused paths walk bare addresses: what does not lie beside its parameter, element by element, they would read and
write past its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aida import Aida
from paths import NATIVE_PATHS, Path, over_paths


def turn_double(p: Tensor, state: dict[str, Any]) -> None:
    p.data = p.data.double()
    p.grad = torch.ones_like(p)


def grow(p: Tensor, state: dict[str, Any]) -> None:
    p.data = torch.zeros(100_000, device=p.device)
    p.grad = torch.ones_like(p)


def grow_and_keep_the_gradient(p: Tensor, state: dict[str, Any]) -> None:
    p.data = torch.zeros(100_000, device=p.device)
    for name in ("exp_avg", "exp_avg_var"):
        state[name] = torch.zeros_like(p)


def halve_the_moments(p: Tensor, state: dict[str, Any]) -> None:
    state["exp_avg_var"] = state["exp_avg_var"].bfloat16()


def move_a_moment(p: Tensor, state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].to("meta")


def count_in_integers(p: Tensor, state: dict[str, Any]) -> None:
    state["step"] = torch.tensor(7)


def other_dtype_behind(name: str) -> Callable[..., None]:
    def change(p: Tensor, state: dict[str, Any]) -> None:
        state[name].data = state[name].data.to(torch.float16)

    change.__name__ = f"other_dtype_behind_{name}"
    return change


def shorten_at_the_same_address(name: str) -> Callable[..., None]:
    def change(p: Tensor, state: dict[str, Any]) -> None:
        state[name].data = state[name].data[:10]

    change.__name__ = f"shorten_{name}"
    return change


def other_bits_at_the_same_address(p: Tensor, state: dict[str, Any]) -> None:
    state["exp_avg"].data = state["exp_avg"].data.view(torch.int32)


def shorten_the_parameter(p: Tensor, state: dict[str, Any]) -> None:
    p.data = p.data[:10]
    p.grad = torch.ones_like(p)


def lengthen_the_parameter(p: Tensor, state: dict[str, Any]) -> None:
    """Up to the end of the memory behind it."""
    p.data = p.data.as_strided((2000,), (1,), 0)
    p.grad = torch.ones_like(p)


def shorten_the_gradient(p: Tensor, state: dict[str, Any]) -> None:
    assert p.grad is not None
    p.grad.data = p.grad.data[:10]


def move_a_counter(p: Tensor, state: dict[str, Any]) -> None:
    state["skipped"] = state["skipped"].to("meta")


def negate_a_moment_by_a_mark(p: Tensor, state: dict[str, Any]) -> None:
    state["exp_avg"] = torch._neg_view(state["exp_avg"])


def put_a_number_in_place_of_a_counter(p: Tensor, state: dict[str, Any]) -> None:
    state["step"] = 0


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (other_dtype_behind(name), f"its {name} is float16")
            for name in ("exp_avg", "exp_avg_var", "step", "skipped")
        ),
        *((shorten_at_the_same_address(name), rf"its {name} is .*\(10,\)") for name in ("exp_avg", "exp_avg_var")),
        (other_bits_at_the_same_address, "its exp_avg is int32"),
        (shorten_the_parameter, r"is float32 of shape \(10,\).*its exp_avg is float32 of shape \(1000,\)"),
        (lengthen_the_parameter, r"is float32 of shape \(2000,\).*its exp_avg is float32 of shape \(1000,\)"),
        (shorten_the_gradient, r"its gradient is float32 of shape \(10,\)"),
        (move_a_counter, "its skipped is float32 .* on meta"),
        (put_a_number_in_place_of_a_counter, "has a int as its step"),
        (negate_a_moment_by_a_mark, "neg bit set on its exp_avg"),
        (turn_double, r"parameter 0\.0 is float64 of shape \(1000,\).*its exp_avg is float32 of shape \(1000,\)"),
        (grow, r"is float32 of shape \(100000,\).*its exp_avg is float32 of shape \(1000,\)"),
        (grow_and_keep_the_gradient, r"its gradient is float32 of shape \(1000,\)"),
        (halve_the_moments, r"its exp_avg_var is bfloat16"),
        (move_a_moment, r"its exp_avg is float32 of shape \(1000,\) on meta"),
        (count_in_integers, r"its step is int64"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_that_does_not_fit_is_refused(path: Path, change: Callable[..., None], said: str) -> None:
    p = torch.zeros(2000, device=path.device)[:1000].requires_grad_()
    optimizer = path.make([p])
    for _ in range(2):  # the second is taken with what the first left
        p.grad = torch.ones_like(p)
        optimizer.step()
    change(p, optimizer.state[p])
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()
    assert torch.equal(p, before)


def test_the_way_out_that_the_error_names() -> None:
    p = torch.zeros(1000, requires_grad=True)
    optimizer = Aida([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    turn_double(p, {})
    after = Aida([p])
    after.load_state_dict(optimizer.state_dict())
    after.step()
    assert after.state[p]["exp_avg"].dtype == torch.float64
    assert after.state[p]["step"] == 2
