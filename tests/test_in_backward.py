"""step_in_backward: each parameter is updated during the backward pass, as by step() after it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from aida import Aida

STORAGES: list[dict[str, Any]] = [{}, {"state_precision": "fp8"}]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64), nn.Tanh(), nn.Linear(64, 4))


def loss(model: nn.Module, step: int) -> Tensor:
    return model(torch.randn(16, 64, generator=torch.Generator().manual_seed(step))).square().mean()


def train(model: nn.Module, optimizer: Aida, first: int, steps: int, inside: bool) -> None:
    schedule = ExponentialLR(optimizer, 0.9)
    for step in range(first, first + steps):
        loss(model, step).backward()
        assert all((p.grad is None) == inside for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def bits(model: nn.Module, optimizer: Aida) -> list[Tensor]:
    return [t for p in model.parameters() for t in (p.detach(), *optimizer.state[p].values())]


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters()}, {"params": list(model.parameters())[2:], "weight_decay": 0.1}]


@pytest.mark.parametrize("storage", STORAGES)
def test_steps_inside_the_backward_pass_have_the_bits_of_steps_after_it(storage: dict[str, Any]) -> None:
    found = []
    for inside in (False, True):
        model = make()
        optimizer = Aida(groups(model), lr=1e-2, **storage)
        handles = optimizer.step_in_backward() if inside else []
        train(model, optimizer, 0, 3, inside)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)  # replaces groups and state
        train(model, optimizer, 3, 3, inside)
        for handle in handles:
            handle.remove()
        train(model, optimizer, 6, 1, inside=False)
        found.append(bits(model, optimizer))
    assert all(map(torch.equal, *found))


def test_a_gradient_is_freed_before_the_next_one_is_complete() -> None:
    model = make()
    optimizer = Aida(model.parameters(), lr=1e-2)
    alive = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: alive.append(sum(q.grad is not None for q in model.parameters()))
        )
    optimizer.step_in_backward()
    loss(model, 0).backward()
    assert alive == [1] * 6


def test_what_needs_all_gradients_at_once_is_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match=r"clip_norm=1\.0 needs all gradients at once"):
        Aida(model.parameters(), clip_norm=1.0).step_in_backward()
    optimizer = Aida(model.parameters())
    optimizer.step_in_backward()
    optimizer.param_groups[0]["clip_norm"] = 1.0
    with pytest.raises(RuntimeError, match="clip_norm cannot step inside a backward pass"):
        loss(model, 0).backward()


def test_a_lazy_parameter_is_refused_and_a_frozen_one_left_out() -> None:
    with pytest.raises(ValueError, match="lazy"):
        Aida(nn.LazyLinear(3).parameters()).step_in_backward()
    model = make()
    model[0].requires_grad_(False)
    assert len(Aida(model.parameters()).step_in_backward()) == 4


def test_two_models_may_train_in_two_threads() -> None:
    found: list[list[Tensor]] = [[], []]

    def work(number: int) -> None:
        model = make()
        optimizer = Aida(model.parameters(), lr=1e-2)
        optimizer.step_in_backward()
        for step in range(5):
            model(torch.full((4, 64), float(step))).square().mean().backward()
        found[number] = bits(model, optimizer)

    torch.manual_seed(0)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(one) == 30 for one in found)
