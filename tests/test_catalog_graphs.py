"""Steps of the catalog's optimizers inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from catalog_cases import (
    STEPS,
    build,
    over_catalog,
    values_of,
    weights,
)


@pytest.mark.gpu
@over_catalog()
def test_a_captured_step_replays_as_eager_steps_do(name: str) -> None:
    def fresh() -> tuple[list[Parameter], Optimizer]:
        params = [Parameter(w.detach().cuda()) for w in weights()]
        return params, build(name, params, lr=0.01, capturable=True, **values_of(name, weight_decay=0.1))

    if name == "sgd":
        pytest.skip("torch's SGD has no capturable: its momentum needs no step count")
    eager, by_hand = fresh()
    params, optimizer = fresh()
    static = [torch.zeros_like(p) for p in params]
    for p, g in zip(params, static, strict=True):
        p.grad = g

    def feed(step: int, targets: list[Tensor]) -> None:
        rng = torch.Generator().manual_seed(step)
        for target in targets:
            target.copy_(torch.randn(target.shape, generator=rng))

    for p in eager:
        p.grad = torch.zeros_like(p)
    grads = [p.grad for p in eager]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # state is made before the capture
        feed(0, static)
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, STEPS):
        feed(step, static)
        graph.replay()
    for step in range(STEPS):
        feed(step, grads)  # type: ignore[arg-type]
        by_hand.step()
    for p, q in zip(params, eager, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
