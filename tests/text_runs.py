"""Driving a text task without the training loop: a spec, a few steps, a checkpoint in memory."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from aida_lab.data.translation import BEGIN, END, Pairs, Sentences
from aida_lab.spec import Precision, RunSpec
from aida_lab.task import Task, TaskContext
from lab_cases import words


def context(
    *,
    batch: int,
    seed: int = 3,
    limit: int | None = None,
    variant: str = "default",
    precision: Precision = "fp32",
    compiled: bool = False,
) -> TaskContext:
    spec = RunSpec(
        experiment="text",
        optimizer="sgd",
        hyper={},
        seed=seed,
        epochs=1,
        batch=batch,
        precision=precision,
        variant=variant,
        compiled=compiled,
        limit=limit,
    )
    return TaskContext(spec, torch.device("cpu"))


#: Words of the sentences below, those with a meaning of their own among them.
VOCABULARY = 50


def sentences(count: int, seed: int, longest: int = 20) -> Sentences:
    """Random ones, of different lengths."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, longest - 1, (count,)).tolist()
    rows = [torch.tensor([BEGIN, *words(n, vocabulary=VOCABULARY).tolist(), END]) for n in lengths]
    starts = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return Sentences(torch.cat(rows).int(), starts)


def pairs(count: int, seed: int = 0) -> Pairs:
    return Pairs(sentences(count, 2 * seed), sentences(count, 2 * seed + 1, longest=17))


def sgd(task: Task, lr: float = 0.1) -> dict[str, Optimizer]:
    """With momentum, so that it has state to lose."""
    return {name: torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9) for name, module in task.modules.items()}


def steps(task: Task, optimizers: dict[str, Optimizer], first: int, last: int) -> list[Tensor]:
    """The losses of these steps of the epoch that has begun."""
    return [task.step(task.kind(i), task.batch(i), optimizers) for i in range(first, last)]


def checkpoint(task: Task, optimizers: dict[str, Optimizer]) -> dict[str, Any]:
    """All that the loop keeps of a run, as it is now."""
    return copy.deepcopy(
        {
            "modules": {name: module.state_dict() for name, module in task.modules.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
            "extra": task.extra_state(),
            "rng": torch.get_rng_state(),
        }
    )


def restore(task: Task, optimizers: dict[str, Optimizer], kept: dict[str, Any]) -> None:
    for name, module in task.modules.items():
        module.load_state_dict(kept["modules"][name])
        optimizers[name].load_state_dict(kept["optimizers"][name])
    task.load_extra_state(kept["extra"])
    torch.set_rng_state(kept["rng"])


def assert_resumes_within_an_epoch(make: functools.partial[Any], epoch: int = 2, first: int = 2, last: int = 5) -> None:
    """Another task, begun anew and given the checkpoint, takes bitwise the same steps to the same place."""
    torch.manual_seed(7)
    task = make()
    optimizers = sgd(task)
    task.begin_epoch(epoch)
    steps(task, optimizers, 0, first)
    kept = checkpoint(task, optimizers)
    wanted = steps(task, optimizers, first, last)

    torch.manual_seed(8)
    other = make()
    others = sgd(other)
    other.begin_epoch(0)
    steps(other, others, 0, 1)  # a past of its own, which must not show
    restore(other, others, kept)
    other.begin_epoch(epoch)
    got = steps(other, others, first, last)
    assert [loss.item() for loss in got] == [loss.item() for loss in wanted]
    for name, module in task.modules.items():
        for mine, theirs in zip(module.parameters(), other.modules[name].parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert task.evaluate(False) == other.evaluate(False)
