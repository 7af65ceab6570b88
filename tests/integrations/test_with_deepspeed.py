"""DeepSpeed: stage 0 trains as by hand; ZeRO 1 to 3 cut layers up and are refused in words, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from aida import Aida
from processes import Refused, together

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.integrations


def imported() -> Any:
    """DeepSpeed without its own collectives in shared memory, which it would compile for minutes: gloo does."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def by_deepspeed(model: nn.Module, groups: Any, stage: int, **config: Any) -> list[Tensor]:
    config |= {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # as accelerate and the Hugging Face Trainer set it
    }
    engine = imported().initialize(model=model, optimizer=Aida(groups, lr=tiny.LR), config=config)[0]
    x, y = (t.to(next(model.parameters()).dtype) for t in tiny.data())
    for _ in range(tiny.STEPS):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    return tiny.weights(model)


def in_one_group(stage: int) -> list[Tensor]:
    model = tiny.net()
    return by_deepspeed(model, model.parameters(), stage)


def in_two_groups(stage: int) -> list[Tensor]:
    """Matrices and biases apart, as everybody does who decays: the biases' partition looks like a bias."""
    model = tiny.net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]
    return by_deepspeed(model, groups, stage)


def partitioned_from_birth(stage: int) -> list[Tensor]:
    """As the Hugging Face Trainer loads a model under stage 3: parameters are empty when the optimizer is built."""
    with imported().zero.Init(config_dict_or_path={"zero_optimization": {"stage": stage}, "train_batch_size": 16}):
        model = tiny.net()
    return by_deepspeed(model, model.parameters(), stage)


def in_bfloat16() -> list[Tensor]:
    model = tiny.net()
    return by_deepspeed(model, model.parameters(), 0, bf16={"enabled": True}, gradient_clipping=1e3)


def by_accelerate(stage: int) -> list[Tensor]:
    """accelerate's plugin, which turns ZeRO on where the user asked for a stage."""
    from accelerate import Accelerator, DeepSpeedPlugin

    imported()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
    model = tiny.net()
    engine, optimizer = accelerator.prepare(model, Aida(model.parameters(), lr=tiny.LR))
    x, y = tiny.data()
    for _ in range(tiny.STEPS):
        accelerator.backward(nn.functional.mse_loss(engine(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return tiny.weights(model)


#: Everything that one start of DeepSpeed answers, by name and number of processes.
CASES: dict[int, dict[str, Callable[[], list[Tensor]]]] = {
    1: {f"stage {stage}": partial(in_one_group, stage) for stage in (1, 2, 3)}
    | {"bfloat16": in_bfloat16, "stage 2 by accelerate": partial(by_accelerate, 2)},
    2: {f"stage {stage}": partial(in_one_group, stage) for stage in (0, 1, 2, 3)}
    | {f"stage {stage}, two groups": partial(in_two_groups, stage) for stage in (1, 3)}
    | {"stage 3, partitioned from birth": partial(partitioned_from_birth, 3)},
}


@pytest.fixture(scope="module")
def outcomes() -> dict[int, dict[str, tuple[Any, ...]]]:
    return {
        ranks: dict(zip(works, together(*works.values(), ranks=ranks), strict=True)) for ranks, works in CASES.items()
    }


def test_stage_0_trains_as_by_hand(outcomes: dict[int, dict[str, tuple[Any, ...]]]) -> None:
    model = tiny.net()
    by_hand = tiny.train(model, [Aida(model.parameters(), lr=tiny.LR)])

    for weights in outcomes[2]["stage 0"]:
        assert tiny.gap(weights, by_hand) < 1e-6


def test_stage_0_in_bfloat16_updates_its_float32_copies_as_by_hand(
    outcomes: dict[int, dict[str, tuple[Any, ...]]],
) -> None:
    model = tiny.net(torch.bfloat16)
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = Aida(masters, lr=tiny.LR)
    for master in masters:  # DeepSpeed makes the state by a step with gradients of zero, and leaves it counted
        master.grad = torch.zeros_like(master)
    optimizer.step()
    x, y = (t.bfloat16() for t in tiny.data())
    for _ in range(tiny.STEPS):
        gradients = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)

    (weights,) = outcomes[1]["bfloat16"]
    assert weights[0].dtype == torch.bfloat16
    assert tiny.gap(weights, tiny.weights(model)) == 0


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (ranks, case)
        for ranks, works in CASES.items()
        for case in works
        if case[:7] in ("stage 1", "stage 2", "stage 3")
    ],
)
def test_zero_is_refused_in_words_by_every_process(
    outcomes: dict[int, dict[str, tuple[Any, ...]]], ranks: int, case: str
) -> None:
    for outcome in outcomes[ranks][case]:
        assert isinstance(outcome, Refused), "trained on, with layers cut up"
        assert "ZeRO" in outcome.words, outcome.words
        assert "stage 0" in outcome.words, outcome.words
        assert "\n" not in outcome.words
