"""What explain() says after some steps, on optimizers of which it is true and on others of which it is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from aida import Aida, explain
from aida.catalog import find

EPS_DECIDES, SMALLER_EPS = "eps decides: the update is mostly that of the SGD above", "try a smaller eps"
GRADIENTS_DECIDE, LARGER_EPS = "the gradients decide: eps bounds few stepsizes", "try a warm-up"
BOTH_DECIDE = "eps and the gradients decide together"
FLOAT32 = "float32 parameters under autocast"


def stepped(optimizer: torch.optim.Optimizer, *scales: float) -> str:
    """What explain says after ten steps with gradients of these scales, one per parameter, as one line."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    rng = torch.Generator().manual_seed(0)
    for _ in range(10):
        for p, scale in zip(params, scales, strict=True):
            p.grad = (torch.randn(p.shape, generator=rng) * scale).to(p.dtype)
        optimizer.step()
    return " ".join(explain(optimizer).split())


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def test_before_the_first_step_nothing_is_known():
    assert "measured nothing yet" in " ".join(explain(Aida(ones(4))).split())
    assert "measured" not in stepped(Aida(ones(4)), 1.0)
    assert "measured" not in explain(find("sgd").build(ones(4)))  # it never will be


@pytest.mark.parametrize("name", ["aida", "adabelief"])
@pytest.mark.parametrize(
    ("scale", "share", "said", "tried"),
    [(1e-6, "100 %", EPS_DECIDES, SMALLER_EPS), (1.0, "0 %", GRADIENTS_DECIDE, LARGER_EPS)],
)
def test_eps_decides_if_gradients_are_tiny_and_not_if_they_are_large(name, scale, share, said, tried):
    text = stepped(find(name).build(ones(40), eps=1e-8), scale)
    assert f"at the bound {share} of 40 elements" in text
    for words in (EPS_DECIDES, SMALLER_EPS, GRADIENTS_DECIDE, LARGER_EPS, BOTH_DECIDE):
        assert (words in text) == (words in (said, tried)), words


def test_a_smaller_eps_hands_over_to_the_gradients():
    assert EPS_DECIDES in stepped(Aida(ones(40), eps=1e-8), 1e-6)
    assert GRADIENTS_DECIDE in stepped(Aida(ones(40), eps=1e-20), 1e-6)


@pytest.mark.parametrize(("tiny", "said"), [(5, GRADIENTS_DECIDE), (30, BOTH_DECIDE), (60, EPS_DECIDES)])
def test_the_share_counts_elements_not_layers(tiny, said):
    text = stepped(Aida(ones(tiny, 100 - tiny)), 1e-7, 10.0)
    assert f"at the bound {tiny} % of 100 elements; the mean stepsize is" in text
    assert said in text
    assert ("try" in text) == (said != BOTH_DECIDE)


def test_near_the_bound_eps_decides_even_if_few_elements_reach_it():
    text = stepped(Aida(ones(400)), 1.5e-3)
    share = float(text.split("at the bound ")[1].split(" %")[0])
    assert share < 50
    assert EPS_DECIDES in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["aida", "adamw"])
def test_updates_of_ones_are_lost_with_a_small_lr_and_kept_with_a_large_one(name, dtype):
    text = stepped(find(name).build(ones(8, dtype=dtype), lr=1e-5, weight_decay=0.0), 1.0)
    assert "lost updates 100 % of 8 bf16 and fp16 elements" in text
    assert FLOAT32 in text
    text = stepped(find(name).build(ones(8, dtype=dtype), lr=1.0, weight_decay=0.0), 1.0)
    assert "lost updates 0 % of 8 bf16 and fp16 elements" in text
    assert FLOAT32 not in text


def test_float32_parameters_lose_nothing_and_are_not_counted():
    assert "lost" not in stepped(Aida(ones(8), lr=1e-5), 1.0)
    mixed = [*ones(8, dtype=torch.bfloat16), *ones(100)]
    assert "lost updates 100 % of 8 bf16 and fp16 elements" in stepped(Aida(mixed, lr=1e-5), 1.0, 1.0)


def test_lost_updates_that_cannot_be_known_are_said_to_be_unknown():
    assert "lost updates not known" in stepped(torch.optim.NAdam(ones(4, dtype=torch.bfloat16)), 1.0)
    assert "lost" not in stepped(torch.optim.NAdam(ones(4)), 1.0)
    assert "lost" not in explain(torch.optim.NAdam(ones(4, dtype=torch.bfloat16)))  # before the first step


def test_every_group_has_findings_of_its_own():
    groups = [{"params": ones(4)}, {"params": ones(3), "eps": 1e-20}]
    first, second = stepped(Aida(groups), 1e-6, 1e-6).split("group 1")
    assert "at the bound 100 % of 4 elements" in first
    assert "at the bound 0 % of 3 elements" in second


def test_an_outer_eps_is_not_said_to_decide():
    assert "at the bound" not in stepped(torch.optim.Adam(ones(4)), 1e-12)


def test_complex_elements_count_twice():
    text = stepped(Aida(ones(4, dtype=torch.complex64)), 1e-6)
    assert "at the bound 100 % of 8 elements" in text


def test_layers_with_nan_are_counted_and_left_out():
    text = stepped(Aida(ones(4, 3), nonfinite="propagate"), math.nan, 1e-6)
    assert "not finite the state of 1 of 2 layers holds NaN or inf" in text
    assert "at the bound 100 % of 3 elements" in text


def test_explaining_leaves_the_optimizer_as_it_was():
    optimizer = Aida(ones(4))
    stepped(optimizer, 1.0)
    (p,) = optimizer.param_groups[0]["params"]
    before = {key: value.clone() for key, value in optimizer.state[p].items()}
    explain(optimizer)
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[p].items())
    assert not optimizer._optimizer_step_post_hooks


def test_of_a_sharded_parameter_the_own_shard_is_explained(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no distributed package")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        p = nn.Parameter(distribute_tensor(torch.ones(8, 3, dtype=torch.bfloat16), mesh, [Shard(0)]))
        optimizer = Aida([p], lr=1e-5)
        p.grad = distribute_tensor(torch.full((8, 3), 1e-6, dtype=torch.bfloat16), mesh, [Shard(0)])
        optimizer.step()
        text = " ".join(explain(optimizer).split())
        assert "at the bound 100 % of 24 elements on this rank" in text
        assert "lost updates 100 % of 24 bf16 and fp16 elements on this rank" in text
    finally:
        distributed.destroy_process_group()
