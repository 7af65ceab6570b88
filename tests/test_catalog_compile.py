"""torch.compile of the rivals' steps: whole, with the results of eager steps, and not again when lr changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from aida.baselines.contract import Baseline
from aida.catalog import catalog

RIVALS = [name for name, entry in catalog().items() if issubclass(entry.optimizer, Baseline)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(name: str) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (6,), (2, 6))]
    decay = {"weight_decay": 5e-4} if "weight_decay" in catalog()[name].defaults else {}
    lr = torch.tensor(1e-3)
    return params, catalog()[name].build(params, **decay, lr=lr, capturable=True, foreach=True)


@pytest.mark.filterwarnings("ignore:.*capturable=True.*")
@pytest.mark.parametrize("name", RIVALS)
def test_a_compiled_step_is_one_graph_for_all_steps(name: str) -> None:
    eager, compiled = made(name), made(name)
    counter = CompileCounter()
    step = torch.compile(compiled[1].step, backend=counter, fullgraph=True, dynamic=False)
    for number in range(6):
        for params, optimizer in (eager, compiled):
            torch.manual_seed(number)
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.param_groups[0]["lr"].fill_(1e-3 / (number + 1))
        eager[1].step()
        step()
    # the first step makes the state and is another graph than the rest; Fromage keeps none
    assert counter.frame_count == (1 if name == "fromage" else 2)
    for one, other in zip(eager[0], compiled[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
