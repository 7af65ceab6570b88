"""Parameters that hold several layers, compared with the same layers as separate parameters of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from aida import Aida
from layouts import Layout, shard_gap
from stepping import BAD_STEP, DTYPES, Case, Whole, gradient, take_steps, values_of


@dataclass(frozen=True)
class Stack:
    """A shape and the group keys that say which layers it holds."""

    name: str
    shape: tuple[int, ...]
    layer_dims: int = 0
    split_sizes: tuple[int, ...] | None = None
    split_dim: int | None = None

    @property
    def keys(self) -> dict[str, Any]:
        return {"layer_dims": self.layer_dims, "split_sizes": self.split_sizes, "split_dim": self.split_dim}

    @property
    def counters(self) -> tuple[int, ...]:
        """The shape of ``step`` and ``skipped``."""
        return self.shape[: self.layer_dims] + (() if self.split_sizes is None else (len(self.split_sizes),))

    def layers(self, whole: Tensor) -> list[Tensor]:
        """A view of each layer."""
        parts = [whole[index] for index in product(*(range(n) for n in self.shape[: self.layer_dims]))]
        if self.split_sizes is None:
            return parts
        dim = self.layer_dims if self.split_dim is None else self.split_dim % len(self.shape)
        return [piece for part in parts for piece in part.split(list(self.split_sizes), dim - self.layer_dims)]

    def limit(self, case: Case) -> float:
        """The largest gap from separate parameters. Layers that are not dense take the foreach path."""
        dense = all(layer.is_contiguous() for layer in self.layers(torch.empty(self.shape)))
        return case.limit if dense or case.path != "fused" else max(case.limit, 4e-7)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor whose layers these are."""
        whole = torch.empty(self.shape, dtype=parts[0].dtype)
        for view, part in zip(self.layers(whole), parts, strict=True):
            view.copy_(part.detach())
        return whole


STACKS = (
    Stack("experts", (6, 4, 3), 1),
    Stack("fewer experts than ranks", (3, 4, 5), 1),
    Stack("one expert", (1, 4, 3), 1),
    Stack("heads of experts", (3, 4, 5), 2),
    Stack("every number a layer", (5, 3), 2),
    Stack("qkv rows", (9, 4), 0, (3, 4, 2)),
    Stack("qkv columns", (5, 8), 0, (2, 1, 5), 1),
    Stack("qkv counted from the end", (5, 8), 0, (4, 4), -1),
    Stack("splits of experts", (4, 6, 3), 1, (2, 3, 1)),
    Stack("last dimension of experts split", (4, 3, 6), 1, (5, 1), -1),
)


@cache
def as_separate(case: Case, stacks: tuple[Stack, ...]) -> list[Whole]:
    """For each stack what one process has after the steps on its layers as separate parameters."""
    dtype = DTYPES[case.dtype]
    start = values_of([stack.shape for stack in stacks], dtype)
    params = [[nn.Parameter(t.clone()) for t in s.layers(whole)] for s, whole in zip(stacks, start, strict=True)]
    optimizer = case.optimizer([p for some in params for p in some])

    def set_gradients(step: int) -> None:
        for i, (stack, some) in enumerate(zip(stacks, params, strict=True)):
            for p, grad in zip(some, stack.layers(stack_gradient(case, stack, step, i)), strict=True):
                p.grad = grad.clone()

    raised = take_steps(optimizer, set_gradients)
    found = []
    for stack, some in zip(stacks, params, strict=True):
        state: dict[str, Tensor] = {}
        for name in ("exp_avg", "exp_avg_var"):
            state[name] = stack.join([optimizer.state[p][name] for p in some])
        for name in ("step", "skipped"):
            state[name] = torch.stack([optimizer.state[p][name] for p in some]).reshape(stack.counters)
        found.append(Whole([stack.join(some)], [state], raised, {}))
    return found


def stack_gradient(case: Case, stack: Stack, step: int, index: int) -> Tensor:
    """The gradient of a whole stack, in which the last layer of the first stack may be bad."""
    grad = gradient(stack.shape, DTYPES[case.dtype], step, index)
    return case.poison(grad) if case.bad and step == BAD_STEP and index == 0 else grad


def sharded_stacks(case: Case, stacks: Sequence[Stack], layouts: Sequence[Layout | None]) -> tuple[Aida, list[Any]]:
    """An optimizer after the steps of a case, and its parameters: one group per stack."""
    dtype = DTYPES[case.dtype]
    start = values_of([stack.shape for stack in stacks], dtype)
    params = [nn.Parameter(t.clone() if at is None else at.lay(t)) for t, at in zip(start, layouts, strict=True)]
    groups = [{"params": [p], **stack.keys} for p, stack in zip(params, stacks, strict=True)]
    optimizer = case.optimizer(groups)

    def set_gradients(step: int) -> None:
        for i, (p, stack, layout) in enumerate(zip(params, stacks, layouts, strict=True)):
            grad = stack_gradient(case, stack, step, i)
            p.grad = grad.clone() if layout is None else layout.lay_as(case.grads, grad)

    raised = take_steps(optimizer, set_gradients)
    assert raised == as_separate(case.whole, tuple(stacks))[0].raised, f"{case}: steps {raised} raised"
    return optimizer, params


def stacks_gap(case: Case, stacks: Sequence[Stack], layouts: Sequence[Layout | None]) -> float:
    """The largest gap on this rank from the layers as separate parameters of one process; 0 within the limit."""
    optimizer, params = sharded_stacks(case, stacks, layouts)
    worst = 0.0
    for p, stack, whole, layout in zip(params, stacks, as_separate(case.whole, tuple(stacks)), layouts, strict=True):
        state = optimizer.state[p]
        gaps = [shard_gap(layout, p.data, whole.params[0])]
        gaps += [shard_gap(layout, state[name], whole.state[0][name]) for name in ("exp_avg", "exp_avg_var")]
        for name in ("step", "skipped"):
            counts = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
            gaps.append(0.0 if torch.equal(counts, whole.state[0][name]) else float("inf"))
        worst = max(worst, *gaps) if max(gaps) > stack.limit(case) else worst
    return worst
