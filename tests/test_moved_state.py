"""State that moves in memory between steps, by the recipes people use: training goes on as if it had not moved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from aida import Aida
from paths import NATIVE_PATHS, Path, over_paths


def by_the_recipe(optimizer: Aida) -> None:
    """What stands in a thousand training scripts for moving an optimizer to a device."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.data = value.data.to(value.device, copy=True)


def by_the_recipe_with_gradients(optimizer: Aida) -> None:
    for p in optimizer.state:
        p.data = p.data.clone()
        if p.grad is not None:
            p.grad.data = p.grad.data.clone()
    by_the_recipe(optimizer)


def by_new_tensors(optimizer: Aida) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()


def state_into_shared_memory(optimizer: Aida) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.share_memory_()


def model_into_shared_memory(optimizer: Aida) -> None:
    for p in optimizer.state:
        p.share_memory_()


def through_a_queue(optimizer: Aida) -> None:
    """The sender's own tensors are moved into shared memory by the sending."""
    queue = mp.get_context("spawn").SimpleQueue()
    queue.put(optimizer.state_dict())
    received = queue.get()
    for state, theirs in zip(optimizer.state.values(), received["state"].values(), strict=True):
        for name, value in state.items():
            assert torch.equal(value, theirs[name])


def back_from_a_queue(optimizer: Aida) -> None:
    queue = mp.get_context("spawn").SimpleQueue()
    queue.put(optimizer.state_dict())
    optimizer.load_state_dict(queue.get())


def restart_in_place(optimizer: Aida) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def restart_by_data(optimizer: Aida) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = torch.zeros_like(value)


def train(optimizer: Aida, params: list[Tensor], seed: int, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            gradient = torch.randn(p.shape, generator=generator).to(p)
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad.copy_(gradient)
        optimizer.step()


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize(
    "move",
    [
        by_the_recipe,
        by_the_recipe_with_gradients,
        by_new_tensors,
        state_into_shared_memory,
        model_into_shared_memory,
        through_a_queue,
        back_from_a_queue,
    ],
    ids=lambda move: move.__name__,
)
def test_training_goes_on_as_if_the_state_had_not_moved(path: Path, move: Callable[[Aida], None]) -> None:
    if path.device == "cuda" and move in (through_a_queue, back_from_a_queue):
        pytest.skip("a CUDA tensor does not come back to the process that sent it")
    assert moved(path, move) == moved(path, None)


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("restart", [restart_in_place, restart_by_data], ids=lambda restart: restart.__name__)
def test_state_set_to_zero_restarts_the_optimizer(path: Path, restart: Callable[[Aida], None]) -> None:
    optimizer, params = made(path)
    train(optimizer, params, seed=1)
    again = path.make(fresh := [p.detach().clone() for p in params], lr=1e-2)
    restart(optimizer)
    train(optimizer, params, seed=2)
    train(again, fresh, seed=2)

    assert numbers(optimizer, params) == numbers(again, fresh)


def moved(path: Path, move: Callable[[Aida], None] | None) -> Any:
    optimizer, params = made(path)
    train(optimizer, params, seed=1)
    if move is not None:
        move(optimizer)
    # memory that the old tensors may have left: whoever still writes there is found out
    others = [torch.zeros_like(p) for p in params for _ in range(8)]
    train(optimizer, params, seed=2)
    assert not any(other.any() for other in others), "the step wrote into memory that is not its own"
    return numbers(optimizer, params)


def made(path: Path) -> tuple[Aida, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(path.device) for shape in [(40, 30), (300,), ()]]
    return path.make(params, lr=1e-2), params


def numbers(optimizer: Aida, params: list[Tensor]) -> Any:
    return copy.deepcopy([[t.tolist() for t in (p, *optimizer.state[p].values())] for p in params])
