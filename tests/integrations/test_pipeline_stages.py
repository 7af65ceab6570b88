"""Pipeline stages on two gloo ranks: ``norm_group`` gives different layers on different ranks one clipping norm."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from aida import Aida
from aida.backends.cpu import Cpu
from aida.backends.exchange import Exchange
from processes import Refused, together

SHAPES = ((6, 5), (7,))  #: stage 0 has the first tensor, stage 1 the second
STEPS = 4


def gradient(stage: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * stage + step)
    return torch.randn(SHAPES[stage], generator=generator, dtype=torch.float64)


def train(stages: list[int], group: object = None, **values: object) -> list[Tensor]:
    params = [Parameter(torch.ones(SHAPES[stage], dtype=torch.float64)) for stage in stages]
    optimizer = Aida(params, lr=0.01, clip_norm=0.5, **values)  # type: ignore[arg-type]
    optimizer.norm_group = group
    for step in range(STEPS):
        for p, stage in zip(params, stages, strict=True):
            p.grad = None if values and (stage, step) == (1, 2) else gradient(stage, step)
        optimizer.step()
    return [p.detach() for p in params]


def stage_with_group() -> Tensor:
    return train([dist.get_rank()], dist.group.WORLD)[0]


def stage_without_group() -> Tensor:
    return train([dist.get_rank()])[0]


def stage_that_misses_a_gradient() -> Tensor:
    return train([dist.get_rank()], dist.group.WORLD, weight_decay=0.1, decoupled_weight_decay=False)[0]


def nan_on_one_stage() -> tuple[str, Tensor]:
    stage = dist.get_rank()
    p = Parameter(torch.ones(SHAPES[stage]))
    optimizer = Aida([p], nonfinite="raise", clip_norm=1.0)
    optimizer.norm_group = dist.group.WORLD
    p.grad = torch.full_like(p, float("nan") if stage == 1 else 1.0)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value), p.detach()


def plain_and_sharded() -> list[str]:
    """The order of the calls of one step."""
    mesh, calls = init_device_mesh("cpu", (2,)), []
    plain, sharded = Parameter(torch.ones(3)), Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = Aida([plain, sharded])
    plain.grad, sharded.grad = torch.ones(3), distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    finish, apply = Exchange.finish, Cpu.apply

    def noted_finish(self: Exchange, *args: object) -> None:
        calls.append("finish")
        finish(self, *args)  # type: ignore[arg-type]

    def noted_apply(self: Cpu, batch: object, *args: object) -> None:
        calls.append("apply")
        apply(self, batch, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "finish", noted_finish)
        patch.setattr(Cpu, "apply", noted_apply)
        optimizer.step()
    assert torch.equal(plain.detach()[:2], sharded.to_local().detach())
    return calls


def test_stages_with_a_norm_group_train_as_one_process() -> None:
    shared, own, missing, raised, calls = together(
        stage_with_group, stage_without_group, stage_that_misses_a_gradient, nan_on_one_stage, plain_and_sharded
    )
    whole = train([0, 1])
    assert all(torch.equal(a, b) for a, b in zip(shared, whole, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(own, whole, strict=True))  # each clipped by its own norm

    # a stage without a gradient takes part in the all-reduce
    whole = train([0, 1], weight_decay=0.1, decoupled_weight_decay=False)
    assert all(torch.equal(a, b) for a, b in zip(missing, whole, strict=True))

    # nonfinite="raise" raises on every stage, and none has changed
    assert "another rank of norm_group" in raised[0][0]
    assert "parameter 0.0" in raised[1][0]
    assert all(torch.equal(p, torch.ones_like(p)) for _, p in raised)

    # a plain parameter is updated while the sums of the sharded one are under way
    assert not any(isinstance(one, Refused) for one in calls)
    assert calls[0] == ["apply", "finish", "apply"]


def test_copies_forget_the_norm_group() -> None:
    optimizer = Aida([Parameter(torch.ones(2))])
    optimizer.norm_group = object()
    assert copy.deepcopy(optimizer).norm_group is None
    assert pickle.loads(pickle.dumps(optimizer)).norm_group is None
    assert "norm_group" not in optimizer.state_dict()["param_groups"][0]
