"""What any optimizer of the catalog owes its user, whichever method it is: one law a test, over all of them.

Where a law cannot hold for one of torch's own classes, ``catalog_cases.DIFFERS`` says so with the
reason, and the test is expected to fail there: should torch change, the entry must go.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from catalog_cases import (
    STEPS,
    assert_identical,
    build,
    gradients,
    over_catalog,
    over_paths,
    reread,
    snapshot,
    train,
    values_of,
    weights,
)

# -- checkpoints -----------------------------------------------------------------------------------


@over_paths
@over_catalog()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_checkpoint_resumes_bit_exactly_from_any_step(name: str, flags: dict[str, Any], dtype: torch.dtype) -> None:
    values = values_of(name, weight_decay=0.1)
    whole = weights(dtype=dtype)
    optimizer = build(name, whole, **values, **flags)
    saved = []
    for step in range(STEPS):
        saved.append((reread(optimizer.state_dict()), [p.detach().clone() for p in whole]))
        train(whole, optimizer, range(step, step + 1))
    expected = snapshot(whole, optimizer)

    for step, (state_dict, tensors) in enumerate(saved):
        resumed = [Parameter(tensor.clone()) for tensor in tensors]
        revived = build(name, resumed, lr=7.0, **flags)  # what the checkpoint says must win
        revived.load_state_dict(state_dict)
        train(resumed, revived, range(step, STEPS))
        assert_identical(snapshot(resumed, revived), expected)


@over_catalog()
def test_a_loaded_optimizer_shares_no_memory_with_the_checkpoint(name: str) -> None:
    params = weights()
    optimizer = build(name, params)
    train(params, optimizer, range(4))
    state_dict = optimizer.state_dict()
    before = copy.deepcopy(state_dict)
    other = weights()
    revived = build(name, other)
    revived.load_state_dict(copy.deepcopy(state_dict))
    kept = revived.state_dict()
    train(other, revived, range(4, 6))
    for key, saved in before["state"].items():
        for what, value in saved.items():
            now = state_dict["state"][key][what]
            assert torch.equal(now, value) if isinstance(value, Tensor) else now == value
    assert kept["param_groups"] == before["param_groups"]


@over_catalog("foreign-checkpoint")
def test_another_optimizer_s_checkpoint_is_refused(name: str) -> None:
    params = weights()
    donor = build("sgd", params)
    train(params, donor, range(4))
    optimizer = build(name, weights())
    with pytest.raises(ValueError, match=r"is not .*'s: its parameter group 0 lacks .*Load it into the optimizer"):
        optimizer.load_state_dict(donor.state_dict())


@over_paths
@over_catalog()
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_steps_as_the_original_does(name: str, flags: dict[str, Any], clone: Callable[[Any], Any]) -> None:
    params = weights()
    optimizer = build(name, params, **flags)
    train(params, optimizer, range(4))
    twins, twin = clone((params, optimizer))
    assert twins[0] is not params[0]
    train(params, optimizer, range(4, 6))
    train(twins, twin, range(4, 6))
    assert_identical(snapshot(twins, twin), snapshot(params, optimizer))


# -- groups, schedules, closures, hooks ------------------------------------------------------------


@over_paths
@over_catalog()
def test_a_group_s_values_are_its_own(name: str, flags: dict[str, Any]) -> None:
    first, second = values_of(name, lr=0.01, weight_decay=0.1), values_of(name, lr=0.002, betas=(0.5, 0.7))
    together = weights()
    optimizer = build(name, [{"params": together[:2], **first}], **flags)
    optimizer.add_param_group({"params": together[2:], **second})
    train(together, optimizer, range(STEPS))

    apart = weights()
    one, two = build(name, apart[:2], **first, **flags), build(name, apart[2:], **second, **flags)
    for step in range(STEPS):
        for p, g in zip(apart, gradients(step), strict=True):
            p.grad = g
        one.step()
        two.step()
    for p, q in zip(together, apart, strict=True):
        assert torch.equal(p, q)


@over_catalog()
def test_named_parameters_keep_their_names(name: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = build(name, model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    revived = build(name, model.named_parameters())
    revived.load_state_dict(reread(optimizer.state_dict()))
    assert revived.param_groups[0]["param_names"] == ["weight", "bias"]


@over_paths
@over_catalog()
def test_a_scheduler_is_the_same_as_setting_lr_by_hand(name: str, flags: dict[str, Any]) -> None:
    scheduled, manual = weights(), weights()
    optimizer, by_hand = build(name, scheduled, lr=0.01, **flags), build(name, manual, lr=0.01, **flags)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(STEPS):
        by_hand.param_groups[0]["lr"] = 0.01 * 0.5 ** (step // 2)
        train(scheduled, optimizer, range(step, step + 1))
        train(manual, by_hand, range(step, step + 1))
        scheduler.step()
    assert_identical(snapshot(scheduled, optimizer), snapshot(manual, by_hand))


@over_catalog()
def test_lr_may_be_a_tensor(name: str) -> None:
    one, other = weights(), weights()
    number, tensor = build(name, one, lr=0.25), build(name, other, lr=torch.tensor(0.25))
    train(one, number, range(STEPS))
    train(other, tensor, range(STEPS))
    for p, q in zip(one, other, strict=True):
        torch.testing.assert_close(p, q)


@over_catalog()
def test_schedulers_that_move_other_values_find_what_they_need(name: str) -> None:
    """OneCycleLR cycles betas or momentum too, and writes keys of its own into the groups."""
    params = weights()
    optimizer = build(name, params, lr=0.01)
    group = optimizer.param_groups[0]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=STEPS, cycle_momentum="betas" in group or "momentum" in group
    )
    for step in range(STEPS - 1):
        train(params, optimizer, range(step, step + 1))
        scheduler.step()
    assert all(torch.isfinite(p).all() for p in params)


@over_catalog()
def test_a_closure_is_evaluated_once_with_gradients_and_its_loss_returned(name: str) -> None:
    p = Parameter(torch.tensor([3.0]))
    optimizer = build(name, [p], lr=0.01)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) == 9.0
    assert calls == [True]
    for _ in range(20):
        optimizer.step(closure)
    assert abs(p.item()) < 3


@over_catalog()
def test_hooks_see_every_step_and_every_checkpoint(name: str) -> None:
    params = weights()
    optimizer = build(name, params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(f"load {state_dict['mine']}"))
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.append("tensors" if all_plain(loaded) else "something else")
    )
    train(params, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after"] * 2 + ["load 1", "tensors"]


def all_plain(optimizer: Optimizer) -> bool:
    return all(isinstance(value, Tensor | None) for state in optimizer.state.values() for value in state.values())


# -- gradients -------------------------------------------------------------------------------------


@over_paths
@over_catalog()
def test_a_late_gradient_starts_its_own_count(name: str, flags: dict[str, Any]) -> None:
    """A parameter that gets its first gradient late takes the steps it would have taken alone."""
    together = weights()
    optimizer = build(name, together, **flags)
    train(together, optimizer, range(STEPS))
    alone = weights()[3]
    judge = build(name, [alone], **flags)
    for step in range(3, STEPS):
        alone.grad = gradients(step)[3]
        judge.step()
    assert torch.equal(together[3], alone)


@over_paths
@over_catalog()
def test_a_parameter_without_gradient_is_left_alone(name: str, flags: dict[str, Any]) -> None:
    frozen, moving = Parameter(torch.ones(3), requires_grad=False), Parameter(torch.ones(3))
    optimizer = build(name, [frozen, moving], **flags)
    optimizer.step()
    assert len(optimizer.state) == 0
    moving.grad = torch.ones(3)
    optimizer.step()
    optimizer.step()
    assert torch.equal(frozen, torch.ones(3))
    assert frozen not in optimizer.state
    assert not torch.equal(moving, torch.ones(3))


@over_paths
@over_catalog()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_caller_s_gradients_stay_as_received(name: str, flags: dict[str, Any], dtype: torch.dtype) -> None:
    params = weights(dtype=dtype)
    optimizer = build(name, params, maximize=True, **values_of(name, weight_decay=0.1), **flags)
    for step in range(4):
        given = gradients(step, dtype)
        for p, g in zip(params, given, strict=True):
            p.grad = None if g is None else g.clone()
        held = [p.grad for p in params]
        optimizer.step()
        for p, g, tensor in zip(params, given, held, strict=True):
            assert p.grad is tensor
            assert g is None or torch.equal(p.grad, g)  # type: ignore[arg-type]


@over_paths
@over_catalog()
def test_maximize_climbs_where_the_plain_step_falls_on_the_negated_gradient(name: str, flags: dict[str, Any]) -> None:
    up, down = weights(), weights()
    climbing, falling = build(name, up, maximize=True, **flags), build(name, down, **flags)
    for step in range(STEPS):
        for p, q, g in zip(up, down, gradients(step), strict=True):
            p.grad, q.grad = g, None if g is None else -g
        climbing.step()
        falling.step()
    assert_identical(snapshot(up, climbing), snapshot(down, falling))


@over_catalog("sparse")
def test_sparse_gradients_are_refused_before_anything_changed(name: str) -> None:
    dense, sparse = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = build(name, [dense, sparse])
    dense.grad, sparse.grad = torch.ones(3), torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))


@over_paths
@over_catalog()
def test_a_complex_parameter_is_a_pair_of_real_ones(name: str, flags: dict[str, Any]) -> None:
    rng = torch.Generator().manual_seed(0)
    pair = Parameter(torch.randn(4, 2, generator=rng))
    number = Parameter(torch.view_as_complex(pair.detach().clone()))
    left, right = build(name, [pair], **flags), build(name, [number], **flags)
    for _ in range(5):
        pair.grad = torch.randn(4, 2, generator=rng)
        number.grad = torch.view_as_complex(pair.grad.clone())
        left.step()
        right.step()
    torch.testing.assert_close(torch.view_as_real(number.detach()), pair.detach())


@over_paths
@over_catalog("marked-gradient")
def test_a_gradient_conjugate_by_a_mark_is_read_as_what_it_is(name: str, flags: dict[str, Any]) -> None:
    marked, plain = (Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2))
    left, right = build(name, [marked], **flags), build(name, [plain], **flags)
    for step in range(3):
        marked.grad = None
        (marked.conj() * (1 + step + 3j)).imag.sum().backward()
        assert marked.grad.is_conj()
        plain.grad = marked.grad.resolve_conj()
        left.step()
        right.step()
    torch.testing.assert_close(marked.detach(), plain.detach(), rtol=0, atol=0)


@over_catalog("marked-parameter")
@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_a_parameter_that_is_so_by_a_mark_alone_is_refused(name: str, kind: str) -> None:
    conjugate = torch.ones(1, dtype=torch.complex64).conj()
    with pytest.raises(TypeError, match=r"pass tensor\.resolve_conj\(\)\.resolve_neg\(\)"):
        build(name, [Parameter(conjugate if kind == "conjugate" else conjugate.imag)])
