"""accelerate: what it prepares trains as by hand, also under FSDP2, where it swaps the optimizer's parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from aida import Aida
from processes import together

pytest.importorskip("accelerate")

pytestmark = pytest.mark.integrations


def by_accelerate(accelerator: Any, optimizer: Aida, model: nn.Module, *, clip: float | None = None) -> list[Tensor]:
    model, prepared = accelerator.prepare(model, optimizer)
    x, y = tiny.data()
    for _ in range(tiny.STEPS):
        with accelerator.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        prepared.step()
        prepared.zero_grad()
    return tiny.weights(model)


def fresh(**values: Any) -> Any:
    """An Accelerator that remembers nothing of the one before it in this process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **values)


def plainly(precision: str, clip: float | None) -> list[Tensor]:
    model = tiny.net()
    return by_accelerate(fresh(mixed_precision=precision), Aida(model.parameters(), lr=tiny.LR), model, clip=clip)


def under_fsdp2(lean_loading: bool, flags: dict[str, Any]) -> list[Tensor]:
    """accelerate knows FSDP2 on accelerators only; its code runs on a CPU once it believes in one."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=lean_loading)
    accelerator = fresh(fsdp_plugin=plugin)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = tiny.net()
    sharded = by_accelerate(accelerator, Aida(model.parameters(), lr=tiny.LR, **flags), model)
    return [p.full_tensor() for p in sharded]  # type: ignore[attr-defined]


PLAIN = [("no", None), ("no", 0.3), ("bf16", 0.3)]
PATHS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True}, {"foreach": False, "fused": False}]


@pytest.fixture(scope="module")
def trained() -> list[tuple[Any, ...]]:
    return together(*(partial(plainly, *case) for case in PLAIN))


@pytest.fixture(scope="module")
def sharded() -> list[tuple[Any, ...]]:
    return together(*(partial(under_fsdp2, lean, flags) for lean in (False, True) for flags in PATHS))


@pytest.mark.parametrize("case", range(len(PLAIN)), ids=map(str, PLAIN))
def test_a_prepared_optimizer_trains_as_by_hand(trained: list[tuple[Any, ...]], case: int) -> None:
    precision, clip = PLAIN[case]
    model = tiny.net()
    autocast = torch.bfloat16 if precision == "bf16" else None
    by_hand = tiny.train(model, [Aida(model.parameters(), lr=tiny.LR)], clip=clip, autocast=autocast)

    for weights in trained[case]:
        assert tiny.gap(weights, by_hand) < 1e-6


@pytest.mark.parametrize(
    "case", range(2 * len(PATHS)), ids=[f"{lean}-{flags}" for lean in (False, True) for flags in PATHS]
)
def test_fsdp2_trains_as_by_hand_on_every_path(sharded: list[tuple[Any, ...]], case: int) -> None:
    model = tiny.net()
    by_hand = tiny.train(model, [Aida(model.parameters(), lr=tiny.LR)])

    for weights in sharded[case]:
        assert tiny.gap(weights, by_hand) < 1e-6
