"""State and steps on the CPU for parameters elsewhere: the numbers of Aida on a CPU, whatever happens in between."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

from aida import Aida, CPUOffload, explain
from processes import together

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.3},
    "L2, K=1": {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": False, "projections": 1},
    "bf16": {"lr": 1e-3, "state_precision": "fp8", "stochastic_rounding": True},
}
over_devices = pytest.mark.parametrize("device", DEVICES)
over_variants = pytest.mark.parametrize("variant", VARIANTS)


def net(device: str, variant: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 3))
    return model.to(device, torch.bfloat16 if variant == "bf16" else torch.float32)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[::2]}, {"params": named[1::2], "lr": 3e-3, "weight_decay": 0.0}]


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """The parameters after steps whose learning rate a schedule sets."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


def made(kind: type[Any], device: str, variant: str) -> tuple[nn.Sequential, Any]:
    model = net(device, variant)
    return model, kind(groups(model), **VARIANTS[variant])


@over_devices
@over_variants
def test_steps_have_the_bits_of_aida_on_a_cpu_and_the_state_is_there(device: str, variant: str) -> None:
    wanted = train(*made(Aida, "cpu", variant), range(6))
    model, optimizer = made(CPUOffload, device, variant)
    assert all(map(torch.equal, train(model, optimizer, range(6)), wanted))
    assert {p.device.type for p in model.parameters()} == {device}
    held = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    assert len(optimizer.state) == 4
    assert {t.device.type for t in held} == {"cpu"}
    assert all(copied.grad is None for _, copied in optimizer._pairs())


@over_devices
@over_variants
def test_each_loads_the_others_checkpoints(device: str, variant: str) -> None:
    wanted = train(*made(Aida, "cpu", variant), range(6))
    for kinds in ((Aida, CPUOffload, Aida), (CPUOffload, Aida, CPUOffload)):
        model, optimizer = made(kinds[0], "cpu", variant)
        for part, kind in enumerate(kinds[1:]):
            train(model, optimizer, range(2 * part, 2 * part + 2))
            saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
            model, optimizer = made(kind, device if kind is CPUOffload else "cpu", variant)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        assert all(map(torch.equal, train(model, optimizer, range(4, 6)), wanted))


@over_devices
def test_weights_that_were_changed_between_steps_are_not_overwritten(device: str) -> None:
    found = []
    for kind, where in ((Aida, "cpu"), (CPUOffload, device)):
        model, optimizer = made(kind, where, "float32")
        train(model, optimizer, range(2))
        for p in model.parameters():
            p.data.mul_(0.5)
        found.append(train(model, optimizer, range(2, 4)))
    assert all(map(torch.equal, *found))


def test_a_gradient_that_is_not_finite_is_skipped_counted_or_raised() -> None:
    model, optimizer = made(CPUOffload, "cpu", "float32")
    before = [p.detach().clone() for p in model.parameters()]
    give_gradients(model, 0)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert dict(optimizer.skipped()) == {"0.weight": 1}
    assert list(map(torch.equal, model.parameters(), before)) == [True, False, False, False]

    before = [p.detach().clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["nonfinite"] = "raise"
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_groups_can_be_added_and_a_refused_one_changes_nothing() -> None:
    model = net("cpu", "float32")
    optimizer = CPUOffload(model[0].parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="projections"):
        optimizer.add_param_group({"params": model[2].parameters(), "projections": -1})
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-3})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert [group["lr"] for group in optimizer.host.param_groups] == [1e-2, 1e-3]
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, range(1))
    assert not any(map(torch.equal, model.parameters(), before))


def test_values_are_checked_as_those_of_aida() -> None:
    with pytest.raises(ValueError, match="beta parameter"):
        CPUOffload([nn.Parameter(torch.zeros(2))], betas=(1.0, 0.9))
    with pytest.raises(TypeError, match="learning_rate"):
        CPUOffload([nn.Parameter(torch.zeros(2))], learning_rate=1.0)


def test_parameters_without_a_gradient_are_not_touched() -> None:
    model, optimizer = made(CPUOffload, "cpu", "float32")
    give_gradients(model, 0)
    model[0].weight.grad = None
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert len(optimizer.state) == 3


def test_a_copy_of_model_and_optimizer_trains_on_its_own() -> None:
    wanted = train(*made(Aida, "cpu", "float32"), range(4))
    model, optimizer = made(CPUOffload, "cpu", "float32")
    train(model, optimizer, range(2))
    for copied in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        assert all(map(torch.equal, train(*copied, range(2, 4)), wanted))
    assert all(map(torch.equal, train(model, optimizer, range(2, 4)), wanted))


def test_the_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = CPUOffload([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 3.0
    assert bool((p < 1).all())


def test_a_scaler_skips_a_step_that_overflowed() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer, scaler = CPUOffload([p], lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    p.grad = torch.tensor([1.0, float("inf"), 1.0])
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, torch.ones(3))
    assert scaler.get_scale() == 2.0


def test_explain_reads_the_optimizer_of_the_copies() -> None:
    model, optimizer = made(CPUOffload, "cpu", "bf16")
    train(model, optimizer, range(2))
    assert "fp8" in explain(optimizer.host)


def shard() -> str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    try:
        CPUOffload([nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]))])
    except TypeError as error:
        return str(error)
    return ""


def test_sharded_parameters_are_refused_with_the_way_out() -> None:
    ((said,),) = together(shard, ranks=1)
    assert "offload_policy" in said


@pytest.mark.gpu
def test_a_step_takes_no_memory_on_the_gpu() -> None:
    p = nn.Parameter(torch.ones(1 << 20, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = CPUOffload([p])
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() == before
