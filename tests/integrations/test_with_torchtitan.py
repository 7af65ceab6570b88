"""torchtitan's optimizer container with Aida, by the snippet of docs/scaling.md, on parameters that FSDP2 sharded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from aida import Aida
from processes import Refused, together

pytest.importorskip("torchtitan.components.optimizer", reason="needs torchtitan")
pytestmark = pytest.mark.integrations

SCALING = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"


def container(model: torch.nn.Module) -> Any:
    """What torchtitan's trainer builds from its configuration."""
    (snippet,) = re.findall(r"```python\n(from aida.integrations.*?)```", SCALING.read_text(), flags=re.DOTALL)
    printed, ours = "lr=3e-4, eps=1e-12, clip_norm=1.0", f"lr={tiny.LR}, clip_norm=0.3"
    assert printed in snippet
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(snippet.replace(printed, ours), "docs/scaling.md", "exec"), names)
    return names["optimizer"].build(model_parts=[model])


def by_hand(steps: int = 2 * tiny.STEPS) -> list[Tensor]:
    model = tiny.net()
    optimizer = Aida(model.parameters(), lr=tiny.LR, clip_norm=0.3)
    for _ in range(steps // tiny.STEPS):
        weights = tiny.train(model, [optimizer])
    return weights


def resumed() -> tuple[list[Tensor], float]:
    """Save before the first step, train, save, and go on with another container."""
    from torch.distributed.fsdp import fully_shard

    model = tiny.net()
    fully_shard(model)
    first = container(model)
    steps = [float(value) for key, value in first.state_dict().items() if key.endswith(".step")]
    tiny.train(model, [first])
    saved = first.state_dict()
    first.zero_grad()  # torchtitan loads nothing while a gradient is set
    second = container(model)
    second.load_state_dict(saved)
    tiny.train(model, [second])
    return [p.full_tensor().detach() for p in model.parameters()], max(steps)  # type: ignore[attr-defined]


def test_the_container_of_the_documents_trains_and_resumes_as_one_process() -> None:
    (outcomes,) = together(resumed)
    for outcome in outcomes:
        assert not isinstance(outcome, Refused), outcome
        weights, step = outcome
        assert step == 0  # a checkpoint before the first step does not advance it
        assert tiny.gap(weights, by_hand()) < 1e-6  # torch adds the gradients in another order
