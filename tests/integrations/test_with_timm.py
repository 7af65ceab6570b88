"""timm builds Aida by name, with its groups of weight decay and layer decay, its schedulers and its Lookahead."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import documented
import tiny
from aida import Aida, StepsizeProbe, explain
from without_torchvision import import_timm

if find_spec("timm") is None:
    pytest.skip("needs timm", allow_module_level=True)

pytestmark = pytest.mark.integrations

DECAY, LAYER_DECAY = 0.1, 0.5


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    import_timm()
    from aida.integrations.timm import register

    register()
    register()  # a second call changes nothing, and does not warn


def create(model: nn.Module, name: str = "aida", **values: Any) -> Any:
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(model, name, lr=tiny.LR, **values)


def vit() -> nn.Module:
    import timm

    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 3}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **size)
    return model


def train_vit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 16, 16, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    return tiny.weights(model)


def test_the_filter_of_weight_decay_leaves_biases_out_and_decay_is_decoupled() -> None:
    model, by_hand = tiny.net(), tiny.net()
    optimizer = create(model, weight_decay=DECAY, eps=1e-12, betas=(0.8, 0.99))

    assert isinstance(optimizer, Aida)
    weights = tiny.train(model, [optimizer])
    own = Aida(by_hand.parameters(), lr=tiny.LR, eps=1e-12, betas=(0.8, 0.99))
    assert tiny.gap(weights, tiny.train(by_hand, [own], decay=DECAY)) < 1e-6


def test_the_options_of_timms_training_script_reach_aida() -> None:
    from timm.optim import create_optimizer

    options = {
        "opt": "aida",
        "lr": 1e-3,
        "weight_decay": 0.05,
        "momentum": 0.9,
        "opt_eps": 1e-12,
        "opt_betas": [0.8, 0.99],
    }
    optimizer = create_optimizer(SimpleNamespace(**options), vit())
    assert isinstance(optimizer, Aida)
    for group, decay in zip(optimizer.param_groups, (0.0, 0.05), strict=True):
        assert (group["eps"], tuple(group["betas"]), group["weight_decay"]) == (1e-12, (0.8, 0.99), decay)


def test_layer_decay_scales_the_lr_of_every_layer_by_timms_schedulers() -> None:
    from timm.scheduler import create_scheduler_v2

    model, by_hand = vit(), vit()
    optimizer = create(model, weight_decay=DECAY, layer_decay=LAYER_DECAY)
    schedule, _ = create_scheduler_v2(optimizer, sched="step", num_epochs=10, decay_epochs=5, warmup_epochs=0)
    schedule.step(0)
    ours = dict(zip(model.parameters(), by_hand.parameters(), strict=True))
    groups = [
        {
            "params": [ours[p] for p in group["params"]],
            "lr": tiny.LR * group["lr_scale"],
            "weight_decay": group["weight_decay"],
        }
        for group in optimizer.param_groups
    ]

    assert {group["lr"] / tiny.LR for group in groups} == {0.125, 0.25, 0.5, 1.0}
    assert tiny.gap(train_vit(model, optimizer, range(4)), train_vit(by_hand, Aida(groups), range(4))) == 0


def test_lookahead_moves_the_slow_weights_half_way_every_six_steps() -> None:
    model, by_hand = vit(), vit()
    optimizer = create(model, "lookahead_aida")
    aida = Aida(by_hand.parameters(), lr=tiny.LR)
    train_vit(by_hand, aida, range(6))
    slow = tiny.weights(by_hand)  # timm's slow weights begin with those of the sixth step
    train_vit(by_hand, aida, range(6, 12))
    with torch.no_grad():
        for p, mine in zip(by_hand.parameters(), slow, strict=True):
            p.copy_(mine + 0.5 * (p - mine))

    assert tiny.gap(train_vit(model, optimizer, range(12)), tiny.weights(by_hand)) < 1e-6


@pytest.mark.parametrize("name", ["aida", "lookahead_aida"])
def test_a_resumed_run_ends_with_the_same_bits(name: str) -> None:
    whole, first = vit(), vit()
    how: dict[str, Any] = {"weight_decay": DECAY, "layer_decay": LAYER_DECAY}
    expected = train_vit(whole, create(whole, name, **how), range(14))

    optimizer = create(first, name, **how)
    train_vit(first, optimizer, range(8))
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second = vit()
    second.load_state_dict(saved[0])
    resumed = create(second, name, **how)
    resumed.load_state_dict(saved[1])
    assert tiny.gap(train_vit(second, resumed, range(8, 14)), expected) == 0


def test_the_probe_and_explain_look_inside_lookahead() -> None:
    model = vit()
    optimizer = create(model, "lookahead_aida")
    with StepsizeProbe(optimizer, model.named_parameters(), every=2) as probe:
        train_vit(model, optimizer, range(2))
        assert probe.last is not None
        assert len(probe.last.layers) == len(list(model.parameters()))
    assert explain(optimizer).startswith("Aida, group 0")


def test_the_example_of_the_documents_runs() -> None:
    names = documented.run("timm")
    assert names["probe"].last.across.method == "Aida"
    assert names["losses"][-1] < names["losses"][0]
