"""torch.compile of a step: the results of eager steps, and no new compilation when the learning rate changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.nn import Linear, Module, Sequential, Tanh
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.testing import assert_close

from aida import Aida

Kwargs = dict[str, Any]

#: The two paths that a trace can take; under torch.compile the fused ones give way to foreach.
PATHS: list[Kwargs] = [{"foreach": False, "fused": False}, {}]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Pair:
    """Two equal nets with an optimizer each: one steps in eager mode, the other compiled."""

    def __init__(self, backend: Any, net: Module | None = None, *, fullgraph: bool = False, **kwargs: Any) -> None:
        torch.manual_seed(0)
        net = net or Sequential(Linear(4, 3), Tanh(), Linear(3, 2))
        self.nets = [net, deepcopy(net)]
        self.optimizers = [Aida(net.parameters(), **deepcopy(kwargs)) for net in self.nets]
        compiled = self.optimizers[1]
        compiled._opt_called = True  # schedulers look for it, and fullgraph goes past what sets it
        # torch breaks the graph around step() to turn gradients off; without that wrapper it is one graph
        inner = compiled.step.__wrapped__.__wrapped__

        def step() -> None:
            if fullgraph:
                inner(compiled)
            else:
                compiled.step()

        self._compiled_step = torch.compile(step, backend=backend, fullgraph=fullgraph)

    def backward(self) -> None:
        x = torch.randn(5, 4)
        for net in self.nets:
            net.zero_grad()
            net(x).pow(2).sum().backward()

    def step(self) -> None:
        self.optimizers[0].step()
        with torch.no_grad():
            self._compiled_step()

    def each_group(self, change: Callable[[dict[str, Any]], None]) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                change(group)

    def assert_equal(self) -> None:
        eager, compiled = (list(net.parameters()) for net in self.nets)
        assert_close(compiled, eager)
        for p, q in zip(eager, compiled, strict=True):
            assert_close(dict(self.optimizers[1].state[q]), dict(self.optimizers[0].state[p]))


@pytest.mark.parametrize(
    ("kwargs", "fullgraph"),
    [
        ({"foreach": False, "fused": False}, False),
        ({"foreach": False, "fused": False, "clip_norm": 0.1, "maximize": True}, True),
        ({}, False),
        ({"weight_decay": 0.1, "decoupled_weight_decay": False, "maximize": True, "projections": 3}, True),
        ({"weight_decay": 0.1, "decoupled_weight_decay": True, "clip_norm": 0.1}, False),
        ({"nonfinite": "propagate", "projections": 0, "lr": torch.tensor(0.01)}, True),
        ({"state_precision": "bfloat16"}, True),
    ],
    ids=lambda value: "+".join(value) or "default" if isinstance(value, dict) else ("fullgraph" if value else "breaks"),
)
def test_compiled_steps_equal_eager_steps(kwargs: Kwargs, fullgraph: bool) -> None:
    counter = CompileCounter()
    pair = Pair(counter, fullgraph=fullgraph, **kwargs)
    for _ in range(4):
        pair.backward()
        pair.step()
        pair.assert_equal()
    # not one more for the state that the first step makes
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_kernels_equal_eager_steps(backend: str) -> None:
    # one small tensor where C++ has to be compiled for it
    net = Linear(4, 2, bias=False) if backend == "inductor" else None
    pair = Pair(backend, net, weight_decay=0.1, decoupled_weight_decay=False, lr=torch.tensor(0.01))
    for _ in range(3):
        pair.backward()
        pair.step()
    pair.assert_equal()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: "reference" if path else "foreach")
@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks", "fullgraph"])
def test_tensor_lr_changes_without_a_new_compilation(path: Kwargs, fullgraph: bool) -> None:
    counter = CompileCounter()
    pair = Pair(counter, fullgraph=fullgraph, lr=torch.tensor(0.01), **path)
    schedulers = [CosineAnnealingLR(optimizer, T_max=10) for optimizer in pair.optimizers]
    for step in range(6):
        pair.backward()
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        if step == 3:
            pair.each_group(lambda group: group["lr"].mul_(0.5))
        pair.assert_equal()
    assert counter.frame_count == 1


def test_float_lr_does_not_recompile_when_it_changes() -> None:
    # torch alone would take the number for a constant until it changes: aida._step.tracing lends it a tensor
    counter = CompileCounter()
    pair = Pair(counter, lr=0.1)
    schedulers = [ExponentialLR(optimizer, gamma=0.7) for optimizer in pair.optimizers]
    for _ in range(6):
        pair.backward()
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        pair.assert_equal()
    assert counter.frame_count == 1
    assert all(isinstance(group["lr"], float) for group in pair.optimizers[1].param_groups)


def test_a_tensor_skips_a_step_inside_the_graph() -> None:
    counter = CompileCounter()
    pair = Pair(counter)
    for step in range(4):
        pair.backward()
        if step == 2:
            for net in pair.nets:
                net[0].weight.grad[0, 0] = torch.nan
        pair.step()
        pair.assert_equal()
    assert pair.optimizers[1].skipped() == {"0.0": 1}
    assert counter.frame_count == 1


def test_gradients_that_come_and_go_are_guarded() -> None:
    pair = Pair("eager")
    for step in range(5):
        pair.backward()
        for net in pair.nets:
            if step == 2:
                net.zero_grad(set_to_none=True)
            elif step == 3:
                net[2].zero_grad(set_to_none=True)
        pair.step()
        pair.assert_equal()
    steps = [state["step"].item() for state in pair.optimizers[1].state.values()]
    assert steps == [4, 4, 3, 3]


def test_state_that_was_exchanged_is_guarded() -> None:
    pair = Pair("eager")
    for _ in range(2):
        pair.backward()
        pair.step()
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    pair.backward()
    pair.step()
    pair.assert_equal()
    for optimizer in pair.optimizers:
        optimizer.state.clear()
    pair.backward()
    pair.step()
    pair.assert_equal()


def test_closure_is_compiled_with_the_step() -> None:
    def run(compiled: bool) -> Tensor:
        torch.manual_seed(0)
        net: Module = Linear(4, 2)
        x = torch.randn(3, 4)
        optimizer = Aida(net.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = net(x).pow(2).sum()
            loss.backward()
            return loss

        def step() -> None:
            optimizer.step(closure)

        stepper = torch.compile(step, backend="eager") if compiled else step
        for _ in range(3):
            stepper()
        return net.weight.detach()

    assert_close(run(compiled=True), run(compiled=False))


def test_a_whole_training_loop_compiles() -> None:
    def loop() -> list[float]:
        torch.manual_seed(0)
        net = Sequential(Linear(2, 3), Tanh(), Linear(3, 1))
        optimizer = Aida(net.parameters())
        x = torch.ones(4, 2)
        counts = []
        for i in range(5):
            optimizer.zero_grad()
            if i != 3:  # a step without gradients changes nothing
                net(x).sum().backward()
            optimizer.step()
            counts.append(optimizer.state[net[0].weight]["step"].item())
        return counts

    assert torch.compile(loop, backend="eager")() == loop() == [1, 2, 3, 3, 4]


def test_groups_of_other_values_share_one_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    nets = [Linear(3, 3)]
    nets.append(deepcopy(nets[0]))
    optimizers = [
        Aida([{"params": [net.weight], "projections": 1}, {"params": [net.bias], "lr": 0.1, "weight_decay": 0.1}])
        for net in nets
    ]
    compiled = torch.compile(lambda: optimizers[1].step(), backend=counter)
    for _ in range(3):
        x = torch.randn(2, 3)
        for net in nets:
            net.zero_grad()
            net(x).pow(2).sum().backward()
        optimizers[0].step()
        compiled()
    assert_close(list(nets[1].parameters()), list(nets[0].parameters()))
    assert counter.frame_count == 1
