"""Bad input is refused by name: values, groups, parameters and checkpoints that Aida cannot use."""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from aida import Aida
from aida.backends import cpu
from paths import NATIVE_PATHS, Path, over_paths

NAN, INF = math.nan, math.inf

#: A key, a value that it must not have, and what the error says of the rule.
BAD_VALUES: list[tuple[str, Any, str]] = [
    *(("lr", bad, "lr must be a finite number >= 0") for bad in (NAN, INF, -INF, -1e-3, "1e-3", None)),
    ("lr", torch.tensor(NAN), "lr must be a finite number >= 0"),
    ("lr", torch.tensor([0.1, 0.1]), "must be 1-element"),
    *(("eps", bad, "eps must be a finite number > 0") for bad in (NAN, INF, 0, 0.0, -1e-8, 1e-50, "tiny")),
    *(("xi", bad, "must be a finite number > 0 that float32 can hold") for bad in (NAN, INF, 0.0, -1e-20, 1e-39)),
    *(("weight_decay", bad, "must be a finite number >= 0") for bad in (NAN, INF, -0.1, None)),
    *(("betas", (bad, 0.999), "must lie in [0, 1)") for bad in (NAN, INF, -0.1, 1.0, "0.9")),
    *(("betas", (0.9, bad), "must lie in [0, 1)") for bad in (NAN, INF, -0.1, 1.0, 1.5)),
    *(("betas", bad, "must be a pair (beta1, beta2)") for bad in (0.9, (0.9,), (0.9, 0.99, 0.999), None)),
    *(("projections", bad, "must be an integer >= 0") for bad in (-1, 1.5, 2.0, NAN, True, None, "2")),
    *(("clip_norm", bad, "must be a finite number > 0, or None") for bad in (NAN, INF, 0.0, -1.0)),
    *(("nonfinite", bad, "must be one of 'skip', 'propagate', 'raise'") for bad in ("ignore", None, True)),
]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    p = Parameter(torch.ones(shape or (3,), dtype=dtype))
    p.grad = torch.ones_like(p)
    return p


def names_of(value: Any) -> str:
    """How an error may spell the value: one of the pair for betas, the shape where that is what is wrong."""
    if isinstance(value, Tensor):
        return re.escape(str(value.item() if value.numel() == 1 else tuple(value.shape)))
    values = value if isinstance(value, tuple) else (value,)
    return "|".join(re.escape(str(v)) for v in (*values, value))


@pytest.mark.parametrize(("key", "value", "rule"), BAD_VALUES, ids=str)
def test_bad_value_is_refused_everywhere_by_name_and_rule(key: str, value: Any, rule: str) -> None:
    p = weight()
    expected = pytest.raises(ValueError, match=re.escape(rule))
    with expected as everywhere:
        Aida([p], **{key: value})
    with expected as in_group:
        Aida([{"params": [p]}, {"params": [weight()], key: value}])
    optimizer = Aida([p])
    with expected as added:
        optimizer.add_param_group({"params": [weight()], key: value})
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    before = deepcopy([p.detach(), optimizer.state_dict()["state"]])
    if not isinstance(value, Tensor) and value == optimizer.param_groups[0][key]:
        return  # the same number in another type changes nothing, so nobody looks at it
    optimizer.param_groups[0][key] = value
    with expected as later:
        optimizer.step()
    for error in (everywhere, in_group, added, later):
        assert re.search(names_of(value), str(error.value)), error.value
    torch.testing.assert_close([p.detach(), optimizer.state_dict()["state"]], before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"lr": -1.0},
        {"eps": -1.0},
        {"betas": (1.0, 0.999)},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.999)},
        {"weight_decay": -1.0},
        {"lr": torch.tensor(0.1), "foreach": True},
        {"lr": torch.tensor([0.1, 0.1])},
        {"betas": (torch.tensor(0.9), 0.999)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.999)), "foreach": True},
        {"foreach": True, "fused": True},
        {"fused": True, "differentiable": True},
        {"learning_rate": 0.1},
    ],
    ids=str,
)
def test_what_adamw_refuses_is_refused_by_the_same_class(kwargs: dict[str, Any]) -> None:
    with pytest.raises(Exception) as torchs:  # noqa: PT011 - torch says which
        AdamW([weight()], **kwargs)
    with pytest.raises(torchs.type) as ours:
        Aida([weight()], **kwargs)
    assert ours.type is torchs.type


@pytest.mark.parametrize(
    "params",
    [
        list,
        lambda: weight(),
        lambda: [1.0],
        lambda: [weight() * 2],
        lambda: [{"params": {weight()}}],
        lambda: [("a", weight()), weight()],
    ],
    ids=["none", "bare tensor", "number", "non-leaf", "set in a group", "half named"],
)
def test_parameters_that_adamw_refuses_are_refused_by_the_same_class(params: Callable[[], Any]) -> None:
    with pytest.raises(Exception) as torchs:  # noqa: PT011 - torch says which
        AdamW(params())
    with pytest.raises(torchs.type):
        Aida(params())


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("projection", "projections"),
        ("K", "projections"),
        ("weight_decays", "weight_decay"),
        ("wd", "weight_decay"),
        ("learning_rate", "lr"),
        ("beta", "betas"),
        ("epsilon", "eps"),
        ("clipnorm", "clip_norm"),
        ("non_finite", "nonfinite"),
        ("maximise", "maximize"),
        ("decoupled_weightdecay", "decoupled_weight_decay"),
    ],
)
def test_misspelt_group_key_is_refused_with_the_right_one(misspelt: str, meant: str) -> None:
    words = re.compile(f"'{misspelt}'.*did you mean '{meant}'", re.DOTALL)
    with pytest.raises(ValueError, match=words):
        Aida([{"params": [weight()], misspelt: 1}])
    optimizer = Aida([weight()])
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [weight()], misspelt: 1})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "key", ["initial_lr", "lr_scale", "max_lr", "swa_lr", "name", "layer", "wd_mult", "momentum_cache"]
)
def test_key_of_a_scheduler_or_framework_is_left_alone(key: str) -> None:
    p = weight()
    optimizer = Aida([{"params": [p], key: 0.25}])
    optimizer.step()
    assert optimizer.param_groups[0][key] == 0.25
    other = Aida([weight()])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0][key] == 0.25


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_a_frozen_parameter_of_any_dtype_is_accepted_and_left_alone(dtype: torch.dtype) -> None:
    frozen = Parameter(torch.ones(3).to(dtype), requires_grad=False)
    optimizer = Aida([frozen, weight()])
    optimizer.step()
    assert torch.equal(frozen.float(), torch.ones(3))
    assert frozen not in optimizer.state


def test_a_parameter_that_cannot_be_updated_is_refused_with_its_dtype() -> None:
    float8 = torch.ones(3).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"float8_e4m3fn.*master copy"):
        Aida([Parameter(float8)])
    optimizer = Aida([weight()])
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        optimizer.add_param_group({"params": [Parameter(float8)]})
    assert len(optimizer.param_groups) == 1
    thawed = Parameter(float8, requires_grad=False)
    optimizer = Aida([thawed])
    thawed.requires_grad_()
    thawed.grad = float8.clone()
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        optimizer.step()


def test_sparse_parameter_is_refused_with_its_layout() -> None:
    with pytest.raises(TypeError, match=r"dense parameters, not torch.sparse_coo"):
        Aida([torch.eye(3).to_sparse().requires_grad_()])


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks whose collectives go nowhere: enough to make a real DTensor without a network."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_autograd_sees_that_a_step_changed_a_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    p = Parameter(DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = Aida([p])
    square = (p * p).to_local().sum()
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.usefixtures("two_ranks")
def test_a_dtensor_of_partial_values_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    p = Parameter(DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Partial()]))
    with pytest.raises(TypeError, match=r"DTensor of partial values .* redistribute it to Shard or Replicate"):
        Aida([p])
    optimizer = Aida([weight()])
    with pytest.raises(TypeError, match="DTensor"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1


def adabelief_like(p: Tensor) -> dict[str, Any]:
    """AdaBelief's checkpoint: the same names of state as Aida's, and no projections in its groups."""
    optimizer = Aida([p])
    optimizer.step()
    saved = optimizer.state_dict()
    ours = ("projections", "xi", "decoupled_weight_decay", "clip_norm", "nonfinite")
    groups = [{key: value for key, value in group.items() if key not in ours} for group in saved["param_groups"]]
    return {**saved, "param_groups": [{**group, "amsgrad": False, "rectify": True} for group in groups]}


def checkpoint_of(kind: type[Optimizer], **kwargs: Any) -> Callable[[Tensor], dict[str, Any]]:
    def make(p: Tensor) -> dict[str, Any]:
        optimizer = kind([p], **kwargs)
        optimizer.step()
        return optimizer.state_dict()

    return make


def with_our_group(make: Callable[[Tensor], dict[str, Any]]) -> Callable[[Tensor], dict[str, Any]]:
    """Another optimizer's state under a group of Aida's, as a careless conversion leaves it."""
    return lambda p: {**make(p), "param_groups": Aida([p]).state_dict()["param_groups"]}


def edited(**changes: Any) -> Callable[[Tensor], dict[str, Any]]:
    def make(p: Tensor) -> dict[str, Any]:
        saved = checkpoint_of(Aida)(p)
        saved["state"][0].update(changes)
        return saved

    return make


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (checkpoint_of(AdamW), ValueError, "not Aida's.*lacks projections and has .*amsgrad"),
        (checkpoint_of(Adam), ValueError, "not Aida's.*lacks projections"),
        (checkpoint_of(SGD, lr=0.1, momentum=0.9), ValueError, "not Aida's.*lacks betas, eps, projections"),
        (adabelief_like, ValueError, "not Aida's.*lacks projections and has .*rectify"),
        (with_our_group(checkpoint_of(AdamW)), ValueError, "not Aida's: it lacks exp_avg_var and has .*exp_avg_sq"),
        (with_our_group(checkpoint_of(SGD, lr=0.1, momentum=0.9)), ValueError, "lacks step, exp_avg, exp_avg_var"),
        (edited(exp_avg=torch.ones(4)), ValueError, r"exp_avg of parameter 0 has shape \(4,\) but .* has \(3,\)"),
        (edited(exp_avg_var=torch.ones(3, 1)), ValueError, r"exp_avg_var of parameter 0 has shape \(3, 1\)"),
        (edited(exp_avg=torch.ones(3) * 1j), ValueError, "complex64 but the parameter is torch.float32"),
        (edited(exp_avg=[1.0, 1.0, 1.0]), TypeError, "exp_avg of parameter 0 is a list; it must be a tensor"),
        (edited(step=torch.ones(2)), ValueError, r"step of parameter 0 has shape \(2,\); it must be one number"),
    ],
    ids=[
        "AdamW", "Adam", "SGD", "AdaBelief", "AdamW state", "SGD state",
        "exp_avg shape", "exp_avg_var shape", "complex", "list", "step shape",
    ],
)  # fmt: skip
def test_checkpoint_that_is_not_ours_is_refused_and_changes_nothing(
    make: Callable[[Tensor], dict[str, Any]], kind: type[Exception], words: str
) -> None:
    saved = make(weight())
    p = weight()
    optimizer = Aida([p], lr=0.5)
    optimizer.step()
    before = deepcopy(optimizer.state_dict())
    with pytest.raises(kind, match=re.compile(words, re.DOTALL)):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 2


def test_checkpoint_with_a_bad_value_is_refused_before_it_moves_a_weight() -> None:
    p = weight()
    optimizer = Aida([p])
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["eps"] = 0.0
    before = p.detach().clone()

    def load_and_step() -> None:
        optimizer.load_state_dict(saved)
        optimizer.step()

    with pytest.raises(ValueError, match="eps must be a finite number > 0"):
        load_and_step()
    torch.testing.assert_close(p.detach(), before, rtol=0, atol=0)


def test_every_value_lives_in_its_group_and_survives_a_checkpoint() -> None:
    values: dict[str, Any] = {
        "lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-4, "weight_decay": 0.125, "projections": 5, "xi": 1e-9,
        "decoupled_weight_decay": True, "clip_norm": 3.0, "nonfinite": "propagate", "maximize": True,
        "foreach": True, "fused": False, "capturable": True, "differentiable": False,
    }  # fmt: skip
    net = Linear(3, 2)
    optimizer = Aida([{"params": [net.weight], **values}, {"params": [net.bias]}])
    assert {key: optimizer.param_groups[0][key] for key in values} == values
    other = Aida([{"params": [net.weight]}, {"params": [net.bias]}])
    other.load_state_dict(optimizer.state_dict())
    assert {key: other.param_groups[0][key] for key in values} == values
    assert {key: other.param_groups[1][key] for key in values} == {
        key: Aida([weight()]).defaults[key] for key in values
    }


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="an installation without a C compiler is allowed")
def test_the_c_kernel_is_there_where_its_tests_must_not_be_left_out() -> None:
    assert cpu.available()


# -- the swap ----------------------------------------------------------------------------------------


@over_paths(NATIVE_PATHS)
def test_weight_decay_means_what_it_means_for_adamw(path: Path) -> None:
    ours, theirs = (Parameter(torch.ones(5, device=path.device)) for _ in range(2))
    optimizers = path.make([ours], lr=3e-4, weight_decay=0.1), torch.optim.AdamW([theirs], lr=3e-4, weight_decay=0.1)
    for _ in range(3):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = torch.zeros_like(p)
            optimizer.step()
    torch.testing.assert_close(ours.detach(), theirs.detach())
    assert (ours < 1).all()


@pytest.mark.parametrize("fused", [None, False, True])
def test_amp_scaling_is_supported_where_torch_supports_it(fused: bool | None) -> None:
    """Lightning refuses to clip the gradients of an optimizer that has the attribute."""
    ours, theirs = Aida([weight()], fused=fused), torch.optim.AdamW([weight()], fused=fused)
    for optimizer in (ours, pickle.loads(pickle.dumps(ours)), deepcopy(ours)):
        assert hasattr(optimizer, "_step_supports_amp_scaling") == hasattr(theirs, "_step_supports_amp_scaling")


@pytest.mark.parametrize("key", ["eps", "weight_decay", "xi", "clip_norm"])
def test_a_value_that_could_change_unseen_is_refused(key: str) -> None:
    with pytest.raises(TypeError, match=rf"{key} must be a number, not a Tensor .*; only lr and betas may be Tensors"):
        Aida([weight()], **{key: torch.tensor(0.5)})
    optimizer = Aida([weight()])
    optimizer.param_groups[0][key] = torch.tensor(0.5)
    with pytest.raises(TypeError, match="must be a number"):
        optimizer.step()


@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay", "xi", "clip_norm"])
def test_an_array_that_could_change_unseen_is_refused(key: str) -> None:
    """``group["lr"] *= 0.1`` changes a NumPy array in place: the fused path went on with the old value."""
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match=rf"{key} must be a number, not an array .*; pass float\({key}\)"):
        Aida([weight()], **{key: numpy.array(0.5)})
    optimizer = Aida([weight()], **{key: numpy.float64(0.5)})  # a number, which cannot change
    optimizer.param_groups[0][key] = numpy.array(0.5)
    with pytest.raises(TypeError, match="must be a number"):
        optimizer.step()
