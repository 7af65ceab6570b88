"""Other tensors in ``param_groups`` than those given: whole layers are updated, flat pieces of layers are refused.

tests/integrations has the libraries that do this; here are the forms their tensors take, and those of people who
grow, prune or copy a model, which look alike and are right.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from aida import Aida
from paths import NATIVE_PATHS, Path, over_paths

SHAPES = [(3, 4), (3,), (2, 3), (2,)]


def given(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def train(optimizer: Aida, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()


def flat(size: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """What ZeRO 1 and 2 put into a group: one bare tensor over all layers, or this process's part of it."""
    return lambda params: [torch.zeros(size, device=params[0].device).requires_grad_()]


def stage_3(params: list[Tensor]) -> list[Tensor]:
    (partition,) = flat(12)(params)
    partition.ds_id = "0_3"
    return [partition]


def fsdp1(params: list[Tensor]) -> list[Tensor]:
    """The same objects, as shards of one buffer."""
    buffer = torch.cat([p.detach().flatten() for p in params])
    for p, start, stop in zip(params, [0, 12, 13, 13], [12, 13, 13, 13], strict=True):
        p.grad = None
        p.data = buffer[start:stop]
        p._fsdp_flattened = True
    return params


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(flat(24), "ZeRO", id="larger than any layer"),
        pytest.param(flat(12), "ZeRO", id="as large as the largest"),
        pytest.param(flat(5), "ZeRO", id="smaller than the largest"),
        pytest.param(flat(3), "ZeRO", id="as long as another bias"),
        pytest.param(stage_3, "ZeRO", id="ZeRO stage 3"),
        pytest.param(fsdp1, "FSDP", id="FSDP1"),
    ],
)
def test_flat_pieces_of_layers_are_refused_and_nothing_changes(
    path: Path, steps_before: int, change: Callable[[list[Tensor]], list[Tensor]], said: str
) -> None:
    optimizer = path.make(given(path.device), lr=1e-2)
    for _ in range(steps_before):
        train(optimizer)
    group = optimizer.param_groups[0]
    group["params"] = change(list(group["params"]))
    before = [p.detach().clone() for p in group["params"]]

    with pytest.raises(TypeError, match=said):
        train(optimizer)
    assert all(map(torch.equal, group["params"], before))


@over_paths(NATIVE_PATHS)
def test_a_partition_of_biases_that_looks_like_a_bias_is_refused_with_that_of_the_matrices(path: Path) -> None:
    params = given(path.device)
    groups = [{"params": [p for p in params if p.ndim == dims]} for dims in (1, 2)]
    optimizer = path.make(groups, lr=1e-2)
    optimizer.param_groups[0]["params"] = flat(3)(params)
    optimizer.param_groups[1]["params"] = flat(9)(params)

    with pytest.raises(TypeError, match="ZeRO"):
        train(optimizer)
    assert not optimizer.param_groups[0]["params"][0].any()


def copies_in_float32(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().float().requires_grad_() for p in params]


def grown(params: list[Tensor]) -> list[Tensor]:
    """Rows are added, to biases too; as splatting and networks that grow do it."""
    return [nn.Parameter(torch.cat([p.detach(), p.detach()[:1]])) for p in params]


def pruned(params: list[Tensor]) -> list[Tensor]:
    return params[1:]


def extended(params: list[Tensor]) -> list[Tensor]:
    return [*params, nn.Parameter(torch.ones(7, device=params[0].device))]


def in_buckets(params: list[Tensor]) -> list[Tensor]:
    """Views of one buffer with the layers' shapes, as ZeroRedundancyOptimizer and flat DDP buckets keep them."""
    buffer = torch.cat([p.detach().flatten() for p in params])
    for p, view in zip(params, buffer.split([p.numel() for p in params]), strict=True):
        p.data = view.view(p.shape)
    return params


@over_paths(NATIVE_PATHS)
@pytest.mark.parametrize("change", [copies_in_float32, grown, pruned, extended, in_buckets], ids=lambda c: c.__name__)
def test_whole_layers_that_took_a_place_are_trained_as_by_a_new_optimizer(
    path: Path, change: Callable[[list[Tensor]], list[Tensor]]
) -> None:
    dtype = torch.bfloat16 if change is copies_in_float32 else torch.float32
    optimizer = path.make(given(path.device, dtype), lr=1e-2)
    group = optimizer.param_groups[0]
    group["params"] = change(list(group["params"]))
    twins = [p.detach().clone().requires_grad_() for p in group["params"]]
    train(optimizer)
    train(path.make(twins, lr=1e-2))

    assert all(map(torch.equal, group["params"], twins))


@over_paths(NATIVE_PATHS)
def test_whole_layers_that_took_a_place_may_change_places(path: Path) -> None:
    optimizer = path.make(given(path.device), lr=1e-2)
    group = optimizer.param_groups[0]
    group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    train(optimizer)
    group["params"].reverse()
    train(optimizer)
    assert {int(optimizer.state[p]["step"]) for p in group["params"]} == {6}


@over_paths(NATIVE_PATHS)
def test_a_checkpoint_does_not_make_flat_pieces_of_layers_acceptable(path: Path) -> None:
    optimizer = path.make(given(path.device), lr=1e-2)
    group = optimizer.param_groups[0]
    group["params"] = flat(12)(list(group["params"]))
    with pytest.raises(TypeError, match="ZeRO"):
        optimizer.load_state_dict(optimizer.state_dict())


@over_paths(NATIVE_PATHS)
def test_torch_may_swap_the_tensors_of_a_model_whose_optimizer_exists(path: Path) -> None:
    """``Module.to`` and ``load_state_dict`` do, on request and for tensor subclasses; no weak reference may exist."""
    model = nn.Linear(3, 4, device=path.device)
    optimizer = path.make(model.parameters(), lr=1e-2)
    train(optimizer)
    optimizer.zero_grad()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: torch.ones_like(p) for name, p in model.state_dict().items()})
        model.bfloat16()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    train(optimizer)
    assert all(p.dtype == torch.bfloat16 and (p != 1).any() for p in model.parameters())


@over_paths(NATIVE_PATHS)
def test_rows_added_between_steps_with_their_state_go_on_from_it(path: Path) -> None:
    """3D Gaussian splatting: a longer tensor takes the place, its state is moved over and padded with zeros."""
    optimizer = path.make(given(path.device), lr=1e-2)
    train(optimizer)
    group = optimizer.param_groups[0]
    for index, old in enumerate(group["params"]):
        state = optimizer.state.pop(old)
        group["params"][index] = new = nn.Parameter(torch.cat([old.detach(), torch.zeros_like(old[:1])]))
        for name in ("exp_avg", "exp_avg_var"):
            state[name] = torch.cat([state[name], torch.zeros_like(state[name][:1])])
        optimizer.state[new] = state
    train(optimizer, seed=2)

    assert [int(optimizer.state[p]["step"]) for p in group["params"]] == [6, 6, 6, 6]
    assert all(p[-1].abs().min() > 0 for p in group["params"])
