"""torchao's CPUOffloadOptimizer builds one optimizer per large parameter: ``clip_norm`` there is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from aida import Aida

cpu_offload = pytest.importorskip("torchao.optim.cpu_offload")

pytestmark = pytest.mark.integrations


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao asks for a GPU before it builds anything; parameters below its minimal size need none."""
    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(torch.cuda, "Stream", object)


def offloaded(**values: Any) -> Any:
    return cpu_offload.CPUOffloadOptimizer(tiny.net().parameters(), Aida, lr=tiny.LR, **values)


@pytest.mark.usefixtures("without_a_gpu")
def test_clip_norm_in_an_optimizer_over_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"clip_norm.*CPUOffloadOptimizer"):
        offloaded(clip_norm=1.0)


@pytest.mark.usefixtures("without_a_gpu")
def test_without_clip_norm_it_builds_its_parts() -> None:
    assert isinstance(offloaded().d_opt, Aida)


@pytest.mark.gpu
def test_clip_norm_in_the_optimizer_of_one_large_parameter_is_refused() -> None:
    model = tiny.net().cuda()

    assert len(cpu_offload.CPUOffloadOptimizer(model.parameters(), Aida, minimal_size=0).optim_dict) == 4
    with pytest.raises(ValueError, match=r"clip_norm.*CPUOffloadOptimizer"):
        cpu_offload.CPUOffloadOptimizer(model.parameters(), Aida, minimal_size=0, clip_norm=1.0)
