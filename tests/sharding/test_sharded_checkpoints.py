"""A checkpoint of a sharded run is resumed on any number of ranks, in any layout, with the bits of the unbroken run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from aida import Aida
from layouts import LAYOUTS, Layout, shard_gap
from processes import together
from stepping import gradient

PLACED: dict[str, Layout | None] = {layout.name: layout for layout in LAYOUTS} | {"plain": None}
SHAPES = {"rows": (7, 5), "row": (1, 3), "vector": (9,), "experts": (3, 4, 2), "coded": (16, 512), "unused": (6, 4)}
BEFORE, AFTER = 3, 5


class Net(nn.Module):
    """Parameters whose gradients are given. The last one never has a gradient."""

    def __init__(self, layout: Layout | None) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            fits = layout is not None and layout.fits(shape)
            self.register_parameter(name, nn.Parameter(layout.lay(whole) if layout is not None and fits else whole))

    def optimizer(self) -> Aida:
        named = dict(self.named_parameters())
        experts = {"params": [named.pop("experts")], "layer_dims": 1}
        coded = {"params": [named.pop("coded")], "state_precision": "fp8"}
        return Aida(
            [{"params": list(named.values())}, experts, coded], lr=1e-2, eps=1e-10, weight_decay=0.1, clip_norm=0.7
        )


def train(net: Net, optimizer: Aida, layout: Layout | None, first: int, count: int) -> None:
    for step in range(first, first + count):
        for i, p in enumerate(net.parameters()):
            grad = gradient(tuple(p.shape), torch.float32, step, i)
            if p is net.rows and step == 1:
                grad = grad * float("nan")
            fits = layout is not None and layout.fits(tuple(p.shape))
            p.grad = layout.lay(grad) if layout is not None and fits else grad.clone()
        net.unused.grad = None
        optimizer.step()
        optimizer.zero_grad()


def unbroken() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    net = Net(None)
    optimizer = net.optimizer()
    train(net, optimizer, None, 0, BEFORE + AFTER)
    named = dict(net.named_parameters())
    return {n: p.data for n, p in named.items()}, {n: dict(optimizer.state.get(p, {})) for n, p in named.items()}


def gap_from_unbroken(net: Net, optimizer: Aida, layout: Layout | None) -> float:
    params, state = unbroken()
    gaps = []
    for name, p in net.named_parameters():
        gaps.append(shard_gap(layout, p.data, params[name]))
        for key, value in state[name].items():
            mine = optimizer.state[p][key]
            if key in ("step", "skipped"):
                mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
                gaps.append(0.0 if torch.equal(mine, value) else float("inf"))
            else:
                gaps.append(shard_gap(layout, mine, value))
    return max(gaps)


def options_of(form: str) -> StateDictOptions:
    return StateDictOptions(
        flatten_optimizer_state_dict=form == "flat",
        full_state_dict=form == "full",
        broadcast_from_rank0=form == "full",
        cpu_offload=form == "full",
    )


def save(folder: str, form: str, layout_name: str) -> list[str]:
    """Train, save, and return the keys of the optimizer's state on this rank."""
    layout = PLACED[layout_name]
    net = Net(layout)
    optimizer = net.optimizer()
    train(net, optimizer, layout, 0, BEFORE)
    if form == "own":  # the optimizer's own state dict, with whole tensors
        if dist.get_rank() == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/own")
        dist.barrier()
        return []
    options = options_of(form)
    state = get_optimizer_state_dict(net, optimizer, options=options)
    keys = sorted(state if form == "flat" else state.get("state", ()))
    if form == "full":
        if dist.get_rank() == 0:
            torch.save(state, f"{folder}/full")
        model = {name: p.full_tensor() if hasattr(p, "full_tensor") else p.data for name, p in net.named_parameters()}
        if dist.get_rank() == 0:
            torch.save(model, f"{folder}/full-model")
        dist.barrier()
        return keys
    content = {"model": net.state_dict(), "optimizer": state}
    if form == "async":
        future = dcp.async_save(content, checkpoint_id=f"{folder}/{form}", process_group=dist.new_group(backend="gloo"))
        train(net, optimizer, layout, BEFORE, 1)  # the checkpoint must not see this step
        future.result()
    else:
        dcp.save(content, checkpoint_id=f"{folder}/{form}")
    return keys


def resume(folder: str, form: str, layout_name: str) -> float:
    """Load into a new optimizer, take the other steps, and compare with the unbroken run."""
    layout = PLACED[layout_name]
    net = Net(layout)
    optimizer = net.optimizer()
    options = options_of(form)
    if form == "own":
        saved = torch.load(f"{folder}/own", weights_only=False)
        with torch.no_grad():
            for name, p in net.named_parameters():
                whole = saved["model"][name]
                p.copy_(layout.lay(whole) if layout is not None and layout.fits(tuple(p.shape)) else whole)
        optimizer.load_state_dict(saved["optimizer"])
    elif form == "full":
        first = dist.get_rank() == 0
        set_optimizer_state_dict(
            net, optimizer, torch.load(f"{folder}/full", weights_only=False) if first else {}, options=options
        )
        with torch.no_grad():
            for name, whole in torch.load(f"{folder}/full-model", weights_only=False).items():
                p = net.get_parameter(name)
                p.copy_(layout.lay(whole) if layout is not None and layout.fits(tuple(p.shape)) else whole)
    else:
        content = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer, options=options)}
        dcp.load(content, checkpoint_id=f"{folder}/{form}")
        net.load_state_dict(content["model"])
        set_optimizer_state_dict(net, optimizer, content["optimizer"], options=options)
    train(net, optimizer, layout, BEFORE, AFTER)
    return gap_from_unbroken(net, optimizer, layout)


def before_the_first_step(layout_name: str) -> tuple[set[float], float]:
    """The steps and the largest moment after the state was made for a checkpoint."""
    layout = PLACED[layout_name]
    net = Net(layout)
    optimizer = net.optimizer()
    get_optimizer_state_dict(net, optimizer)
    states = [{k: getattr(v, "_local_tensor", v) for k, v in state.items()} for state in optimizer.state.values()]
    steps = {float(n) for state in states for n in state["step"].reshape(-1)}
    names = ("exp_avg", "exp_avg_var", "exp_avg_codes", "exp_avg_std_codes")
    moments = [state[name].float().abs().sum() for state in states for name in names if name in state]
    return steps, float(sum(moments))


FORMS = ("flat", "nested", "full", "async")
#: Layouts per number of ranks that checkpoints of "rows over 4" are resumed in.
RESUMED = {
    1: ("plain",),
    2: ("rows over 2", "columns over 2"),
    4: ("HSDP 2x2", "FSDP2 on TP rows 2x2"),
    8: ("rows over 8", "HSDP x TP columns 2x2x2"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, tuple[Any, ...]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    works: dict[Any, Any] = {}
    for form in FORMS:
        works["keys", form] = partial(save, str(folder), form, "rows over 4")
    works["early"] = partial(before_the_first_step, "rows over 4")
    found = dict(zip(works, together(*works.values(), ranks=4, limit=100), strict=True))
    for origin in ("HSDP 2x2", "columns over 4"):
        Path(folder, origin).mkdir()
    more = {
        ("keys", origin): partial(save, f"{folder}/{origin}", "flat", origin)
        for origin in ("HSDP 2x2", "columns over 4")
    }
    found |= dict(zip(more, together(*more.values(), ranks=4, limit=100), strict=True))
    found |= {("keys", "own"): together(partial(save, str(folder), "own", "plain"), ranks=1)[0]}
    for ranks, names in RESUMED.items():
        again = {(name, form): partial(resume, str(folder), form, name) for name in names for form in FORMS}
        if ranks != 1:
            again |= {(name, "own"): partial(resume, str(folder), "own", name) for name in names}
        for origin in ("HSDP 2x2", "columns over 4"):
            again |= {(name, origin): partial(resume, f"{folder}/{origin}", "flat", name) for name in names}
        found |= dict(zip(again, together(*again.values(), ranks=ranks, limit=100), strict=True))
    return found


ALL = [
    (name, form)
    for names in RESUMED.values()
    for name in names
    for form in (*FORMS, "own", "HSDP 2x2", "columns over 4")
]


@pytest.mark.parametrize(("name", "form"), [pair for pair in ALL if pair != ("plain", "own")])
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(
    outcomes: dict[Any, tuple[Any, ...]], name: str, form: str
) -> None:
    assert set(outcomes[name, form]) == {0.0}


@pytest.mark.parametrize("form", ["flat", "nested", "async"])
def test_every_rank_saves_the_same_keys_also_of_parameters_without_gradient(
    outcomes: dict[Any, tuple[Any, ...]], form: str
) -> None:
    keys = outcomes["keys", form]
    assert all(mine == keys[0] for mine in keys)
    assert any("unused" in key for key in keys[0])


def test_a_checkpoint_before_the_first_step_changes_no_state(outcomes: dict[Any, tuple[Any, ...]]) -> None:
    assert outcomes["early"] == (({0.0}, 0.0),) * 4
