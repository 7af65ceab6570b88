"""accelerate: what it prepares trains, resumes and is measured as by hand; under FSDP2 it swaps parameters."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import documented
import tiny
from aida import Aida, StepsizeProbe, explain
from processes import together

pytest.importorskip("accelerate")

pytestmark = pytest.mark.integrations


def by_accelerate(accelerator: Any, optimizer: Aida, model: nn.Module, *, clip: float | None = None) -> list[Tensor]:
    return train_prepared(accelerator, *accelerator.prepare(model, optimizer), clip=clip)


def train_prepared(accelerator: Any, model: nn.Module, prepared: Any, clip: float | None = None) -> list[Tensor]:
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


def saved(folder: str, stop: bool, sharded: bool = False) -> list[Tensor]:
    """Train twice, with or without saving, ending and loading in between."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    # prepare() makes the kind of the process's state that of a CPU again
    fsdp = patch.object(Accelerator, "distributed_type", DistributedType.FSDP) if sharded else nullcontext()

    def start() -> tuple[Any, Any, Any]:
        accelerator = fsdp2(False) if sharded else fresh()
        model = tiny.net()
        return accelerator, *accelerator.prepare(model, Aida(model.parameters(), lr=tiny.LR))

    prepared = start()
    train_prepared(*prepared, clip=0.3)
    if stop:
        with fsdp:
            prepared[0].save_state(folder)
        prepared = start()
        with fsdp:
            prepared[0].load_state(folder)
    weights = train_prepared(*prepared, clip=0.3)
    return [p.full_tensor() for p in weights] if sharded else weights  # type: ignore[attr-defined]


def measured_under_fsdp2() -> list[tuple[int, str, int, float]]:
    accelerator = fsdp2(False)
    model = tiny.net()
    model, prepared = accelerator.prepare(model, Aida(model.parameters(), lr=tiny.LR))
    with StepsizeProbe(prepared, model.named_parameters(), every=2) as probe:
        train_prepared(accelerator, model, prepared)
    assert probe.last is not None
    return [(record.step, record.layer, record.elements, record.mean) for record in probe.last.layers]


def fsdp2(lean_loading: bool) -> Any:
    """accelerate knows FSDP2 on accelerators only; its code runs on a CPU once it believes in one."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=lean_loading)
    accelerator = fresh(fsdp_plugin=plugin)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator


def under_fsdp2(lean_loading: bool, flags: dict[str, Any]) -> list[Tensor]:
    model = tiny.net()
    sharded = by_accelerate(fsdp2(lean_loading), Aida(model.parameters(), lr=tiny.LR, **flags), model)
    return [p.full_tensor() for p in sharded]  # type: ignore[attr-defined]


PLAIN = [("no", None), ("no", 0.3), ("bf16", 0.3)]
PATHS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True}, {"foreach": False, "fused": False}]


@pytest.fixture(scope="module")
def sharded() -> list[tuple[Any, ...]]:
    return together(*(partial(under_fsdp2, lean, flags) for lean in (False, True) for flags in PATHS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    folder = str(tmp_path_factory.mktemp("state"))
    runs = [partial(saved, f"{folder}/{sharded}", stop, sharded) for sharded in (False, True) for stop in (False, True)]
    return together(*(partial(plainly, *case) for case in PLAIN), measured_under_fsdp2, *runs)


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


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
def test_a_run_resumed_from_save_state_ends_with_the_same_bits(trained: list[tuple[Any, ...]], sharded: bool) -> None:
    model = tiny.net()
    optimizer = Aida(model.parameters(), lr=tiny.LR)
    for _ in range(2):
        by_hand = tiny.train(model, [optimizer], clip=0.3)
    runs = trained[len(PLAIN) + 1 :]
    for whole, resumed in zip(*runs[2 * sharded :][:2], strict=True):
        assert tiny.gap(whole, by_hand) < 1e-6
        assert tiny.gap(resumed, whole) == 0


def test_under_fsdp2_every_rank_measures_its_shards(trained: list[tuple[Any, ...]]) -> None:
    elements: dict[str, int] = {}
    for records in trained[len(PLAIN)]:
        for step, layer, size, mean in records:
            assert step == tiny.STEPS
            assert 0 < mean < 1e4
            elements[layer] = elements.get(layer, 0) + size
    assert elements == {name: p.numel() for name, p in tiny.net().named_parameters()}


def test_the_probe_and_explain_look_inside_a_prepared_optimizer() -> None:
    model = tiny.net()
    model, prepared = fresh().prepare(model, Aida(model.parameters(), lr=tiny.LR))
    with StepsizeProbe(prepared, model.named_parameters(), every=1) as probe:
        tiny.train(model, [prepared.optimizer])
    assert probe.last is not None
    assert len(probe.last.layers) == 4
    assert explain(prepared) == explain(prepared.optimizer)


def test_the_example_of_the_documents_runs() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    names = documented.run("Accelerate", folder="unused")
    assert names["losses"][-1] < names["losses"][0]
    assert names["probe"].last.across.step == 40
