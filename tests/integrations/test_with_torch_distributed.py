"""torch's own ways to spread a model: right where layers stay whole, and refused in words where they do not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from aida import Aida
from aida.catalog import find
from processes import Refused, together

CLIP = 0.3


def under_fsdp1(steps_before: int, **options: Any) -> list[Tensor]:
    """FSDP1 wrapped around a model whose optimizer exists: the same Parameter objects become flat shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = tiny.net()
    optimizer = options.pop("kind", Aida)(model.parameters(), lr=tiny.LR)
    if steps_before:
        tiny.train(model, [optimizer])
        optimizer.zero_grad()
    strategy = ShardingStrategy[options.pop("strategy", "FULL_SHARD")]
    wrapped = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=strategy
    )
    return tiny.train(wrapped, [optimizer])


def under_zero_redundancy(as_bucket_view: bool, **values: Any) -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = tiny.net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), Aida, parameters_as_bucket_view=as_bucket_view, lr=tiny.LR, **values
    )
    return tiny.train(model, [optimizer])


def clipping_later() -> list[Tensor]:
    """The outer optimizer writes its groups' values into the parts at every step."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = tiny.net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Aida, lr=tiny.LR)
    optimizer.param_groups[0]["clip_norm"] = CLIP
    return tiny.train(model, [optimizer])


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Any, ...]]:
    works = {
        "fsdp1": partial(under_fsdp1, 0),
        "fsdp1 between steps": partial(under_fsdp1, tiny.STEPS),
        "fsdp1 shard_grad_op": partial(under_fsdp1, 0, strategy="SHARD_GRAD_OP"),
        "fsdp1 Fromage": partial(under_fsdp1, 0, kind=find("fromage").optimizer),
        "parts": partial(under_zero_redundancy, False),
        "parts in buckets": partial(under_zero_redundancy, True),
        "clipping parts": partial(under_zero_redundancy, False, clip_norm=CLIP),
        "clipping parts in buckets": partial(under_zero_redundancy, True, clip_norm=CLIP),
        "clipping parts later": clipping_later,
    }
    return dict(zip(works, together(*works.values()), strict=True))


@pytest.mark.parametrize("case", ["fsdp1", "fsdp1 between steps", "fsdp1 shard_grad_op", "fsdp1 Fromage"])
def test_fsdp1_around_a_model_whose_optimizer_exists_is_refused(
    outcomes: dict[str, tuple[Any, ...]], case: str
) -> None:
    for outcome in outcomes[case]:
        assert isinstance(outcome, Refused), "trained on, with layers cut up"
        assert "FSDP" in outcome.words, outcome.words


@pytest.mark.parametrize("case", ["parts", "parts in buckets"])
def test_zero_redundancy_optimizer_trains_as_one_process(outcomes: dict[str, tuple[Any, ...]], case: str) -> None:
    model = tiny.net()
    by_hand = tiny.train(model, [Aida(model.parameters(), lr=tiny.LR)])

    for weights in outcomes[case]:
        assert tiny.gap(weights, by_hand) == 0


@pytest.mark.parametrize("case", ["clipping parts", "clipping parts in buckets", "clipping parts later"])
def test_clip_norm_in_an_optimizer_over_a_part_is_refused(outcomes: dict[str, tuple[Any, ...]], case: str) -> None:
    for outcome in outcomes[case]:
        assert isinstance(outcome, Refused), "each part was clipped by its own norm"
        assert "clip_norm" in outcome.words, outcome.words
        assert "ZeroRedundancyOptimizer" in outcome.words, outcome.words


def own_hooks(model: nn.Module, **values: Any) -> None:
    """torch's tutorial: one optimizer per parameter, stepped as soon as its gradient is there."""
    for p in model.parameters():
        optimizer = Aida([p], lr=tiny.LR, **values)

        def step(p: Tensor, optimizer: Aida = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)


def torchs_hooks(model: nn.Module, **values: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(Aida, model.parameters(), {"lr": tiny.LR, **values})


@pytest.mark.parametrize("hook", [own_hooks, torchs_hooks])
def test_steps_inside_the_backward_pass_are_the_plain_steps(hook: Any) -> None:
    plain, hooked = tiny.net(), tiny.net()
    hook(hooked)

    assert tiny.gap(tiny.train(hooked, []), tiny.train(plain, [Aida(plain.parameters(), lr=tiny.LR)])) == 0


@pytest.mark.parametrize("hook", [own_hooks, torchs_hooks])
def test_clip_norm_inside_the_backward_pass_is_refused(hook: Any) -> None:
    model = tiny.net()
    before = tiny.weights(model)

    def train() -> None:
        hook(model, clip_norm=CLIP)
        tiny.train(model, [])

    with pytest.raises((RuntimeError, ValueError), match="clip_norm"):
        train()
    assert tiny.gap(tiny.weights(model), before) == 0


def test_clip_norm_works_where_a_closure_runs_the_backward_pass_inside_the_step() -> None:
    x, y = tiny.data()
    plain, closed = tiny.net(), tiny.net()
    optimizer = Aida(closed.parameters(), lr=tiny.LR, clip_norm=CLIP)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(closed(x), y)
        loss.backward()
        return loss

    for _ in range(tiny.STEPS):
        optimizer.step(closure)
    by_hand = tiny.train(plain, [Aida(plain.parameters(), lr=tiny.LR)], clip=CLIP)
    assert tiny.gap(tiny.weights(closed), by_hand) < 1e-6
