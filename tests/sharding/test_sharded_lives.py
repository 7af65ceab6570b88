"""What happens to a sharded optimizer between steps, and a real training run under FSDP2."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from aida import Aida
from layouts import LAYOUTS, gap
from processes import together
from stepping import gradient

ROWS = next(layout for layout in LAYOUTS if layout.name == "rows over 2")
SHAPES = ((6, 4), (1, 3), (5,))
OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-10, "clip_norm": 0.7}


def start() -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES)]


def train(params: list[Any], optimizer: Aida, first: int, count: int) -> None:
    for step in range(first, first + count):
        for i, p in enumerate(params):
            grad = gradient(tuple(p.shape), torch.float32, step, i)
            p.grad = ROWS.lay(grad) if isinstance(p, DTensor) else grad.clone()
        optimizer.step()


def due(steps: int) -> list[Tensor]:
    params = [nn.Parameter(t) for t in start()]
    train(params, Aida(params, **OPTIONS), 0, steps)
    return [p.data for p in params]


def gap_from_one(params: list[Any], steps: int) -> float:
    pairs = zip(params, due(steps), strict=True)
    return max(gap(p.to_local(), ROWS.lay(whole).to_local()) for p, whole in pairs)


def sharded() -> tuple[list[Any], Aida]:
    params: list[Any] = [nn.Parameter(ROWS.lay(t)) for t in start()]
    return params, Aida(params, **OPTIONS)


def swapped_in_the_groups() -> float:
    """As accelerate does: the optimizer is built on whole parameters, which DTensors then replace."""
    optimizer = Aida([nn.Parameter(t) for t in start()], **OPTIONS)
    params: list[Any] = [nn.Parameter(ROWS.lay(t)) for t in start()]
    optimizer.param_groups[0]["params"] = params
    train(params, optimizer, 0, 4)
    return gap_from_one(params, 4)


def other_memory() -> float:
    """The local tensors of parameters and state are replaced between steps."""
    params, optimizer = sharded()
    for step in range(4):
        train(params, optimizer, step, 1)
        for p in params:
            p._local_tensor = p._local_tensor.clone()
            optimizer.state[p]["exp_avg"]._local_tensor = optimizer.state[p]["exp_avg"]._local_tensor.clone()
            optimizer.state[p]["exp_avg_var"] = optimizer.state[p]["exp_avg_var"].clone()
            optimizer.state[p]["step"] = optimizer.state[p]["step"].clone()
    return gap_from_one(params, 4)


def other_memory_on_one_rank() -> float:
    params, optimizer = sharded()
    train(params, optimizer, 0, 2)
    if dist.get_rank() == 1:
        params[0]._local_tensor = params[0]._local_tensor.clone()
    train(params, optimizer, 2, 2)
    return gap_from_one(params, 4)


def partial_gradients_and_other_memory_on_one_rank() -> float:
    """Each gradient is redistributed once per step, also on a rank that has to sort its tensors again."""
    params, optimizer = sharded()
    for step in range(4):
        for i, p in enumerate(params):
            half = gradient(tuple(p.shape), torch.float32, step, i) / 2
            p.grad = DTensor.from_local(half, p.device_mesh, [Partial()])
        if step == 2 and dist.get_rank() == 1:
            params[0]._local_tensor.data = params[0]._local_tensor.data.clone()
        optimizer.step()
    return gap_from_one(params, 4)


def one_gradient_of_two_parameters() -> float:
    """The same Partial gradient is redistributed to the placement of each parameter."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.ones(4, 6)
    params = [nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)])) for dim in (0, 1)]
    alone = [nn.Parameter(whole.clone()) for _ in params]
    optimizers = [Aida(each, **OPTIONS) for each in (params, alone)]
    for step in range(2):
        grad = gradient((4, 6), torch.float32, step, 0)
        shared = DTensor.from_local(grad / 2, mesh, [Partial()])
        for p, q in zip(params, alone, strict=True):
            p.grad, q.grad = shared, grad
        for optimizer in optimizers:
            optimizer.step()
    return max(gap(p.full_tensor(), q.data) for p, q in zip(params, alone, strict=True))


def missing_on_one_rank() -> float:
    """A step without a gradient on one rank. Returns the gap of the other parameters, which are not clipped."""
    params, _ = sharded()
    optimizer = Aida(params, **{**OPTIONS, "clip_norm": None})
    whole = [nn.Parameter(t) for t in start()]
    one = Aida(whole, **{**OPTIONS, "clip_norm": None})
    for step in range(3):
        for i, (p, q) in enumerate(zip(params, whole, strict=True)):
            q.grad = gradient(tuple(q.shape), torch.float32, step, i)
            p.grad = None if step == 1 and i == 0 and dist.get_rank() == 1 else ROWS.lay(q.grad)
        optimizer.step()
        one.step()
    return max(gap(p.to_local(), ROWS.lay(q.data).to_local()) for p, q in list(zip(params, whole, strict=True))[1:])


def copied(by: str) -> float:
    params, optimizer = sharded()
    train(params, optimizer, 0, 2)
    if by == "pickle":
        again = pickle.loads(pickle.dumps(optimizer))
    elif by == "torch.save":
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        again = copy.deepcopy(optimizer)
    others = again.param_groups[0]["params"]
    train(others, again, 2, 2)
    train(params, optimizer, 2, 2)  # the original is not disturbed
    return max(gap_from_one(others, 4), gap_from_one(params, 4))


def by_pickle() -> float:
    return copied("pickle")


def by_torch_save() -> float:
    return copied("torch.save")


def by_deepcopy() -> float:
    return copied("deepcopy")


def threads() -> float:
    """Four threads share an optimizer. All gradients are the same, so the order of the threads does not matter."""
    params, optimizer = sharded()
    for i, p in enumerate(params):
        p.grad = ROWS.lay(gradient(tuple(p.shape), torch.float32, 0, i))
    workers = [threading.Thread(target=lambda: [optimizer.step() for _ in range(5)]) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    whole = [nn.Parameter(t) for t in start()]
    one = Aida(whole, **OPTIONS)
    for i, p in enumerate(whole):
        p.grad = gradient(tuple(p.shape), torch.float32, 0, i)
    for _ in range(20):
        one.step()
    return max(gap(p.to_local(), ROWS.lay(q.data).to_local()) for p, q in zip(params, whole, strict=True))


def growth() -> int:
    """New Python objects over 2000 steps on DTensors, after 50 steps."""
    params, optimizer = sharded()
    grads = [ROWS.lay(gradient(shape, torch.float32, 0, i)) for i, shape in enumerate(SHAPES)]

    def steps(count: int) -> int:
        for _ in range(count):
            for p, grad in zip(params, grads, strict=True):
                p.grad = DTensor(grad._local_tensor.clone(), grad._spec, requires_grad=False)
            optimizer.step()
        gc.collect()
        return len(gc.get_objects())

    return -steps(50) + steps(2000)


def losses(parallel: bool) -> list[float]:
    """Train a small transformer. Under FSDP2 every rank sees the whole batch, so gradients are those of one process."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(11, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 11)
    )
    if parallel:
        mesh = init_device_mesh("cpu", (2,))
        for block in model[1].layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = Aida(model.parameters(), lr=3e-3, eps=1e-12, clip_norm=1.0)
    tokens = torch.randint(0, 11, (8, 12), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def transformer() -> list[float]:
    return losses(parallel=True)


EXACT = (
    swapped_in_the_groups, other_memory, other_memory_on_one_rank, partial_gradients_and_other_memory_on_one_rank,
    one_gradient_of_two_parameters, missing_on_one_rank, by_pickle, by_torch_save, by_deepcopy, threads,
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Any, ...]]:
    works = (*EXACT, growth, transformer)
    return dict(zip((work.__name__ for work in works), together(*works, ranks=2, limit=100), strict=True))


@pytest.mark.parametrize("change", [work.__name__ for work in EXACT])
def test_a_change_between_steps_keeps_the_steps_of_one_process(
    outcomes: dict[str, tuple[Any, ...]], change: str
) -> None:
    assert outcomes[change] == (0.0, 0.0)


def test_memory_does_not_grow_over_2000_sharded_steps(outcomes: dict[str, tuple[Any, ...]]) -> None:
    assert all(more < 100 for more in outcomes["growth"]), outcomes["growth"]


def test_a_transformer_under_fsdp2_has_the_losses_of_one_process(outcomes: dict[str, tuple[Any, ...]]) -> None:
    one = losses(parallel=False)
    assert one[-1] < 0.8 * one[0]
    for found in outcomes["transformer"]:
        assert found == pytest.approx(one, rel=1e-5)
