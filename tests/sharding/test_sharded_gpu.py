"""Sharded parameters on a GPU: ranks that share it over gloo, and one NCCL rank (also on a CPU, over gloo)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from aida import Aida
from aida._step.sharding import Span, is_dtensor, local
from layouts import LAYOUTS, Layout, gap
from processes import together
from stepping import BAD, CLIP_L2_K, SHAPES, Case, gradient, matrix, values_of, wrong_cases

PLACED: dict[str, Layout | None] = {layout.name: layout for layout in LAYOUTS} | {"plain": None}
PLACED["HSDP 1x2"] = Layout("HSDP 1x2", (1, 2), (Replicate(), Shard(0)))
#: Some tensors are of several chunks of the kernels.
LARGE = ((300, 701), *SHAPES, (512, 130))

# -- ranks that share the GPU --------------------------------------------------------------------------


def cases(device: str) -> list[Case]:
    found = list(matrix(**CLIP_L2_K, device=(device,), shapes=(LARGE,)))
    for i, (bad, nonfinite) in enumerate(BAD):
        found.append(Case(clip=i % 2 == 0, l2=i >= 2, bad=bad, nonfinite=nonfinite, device=device))
    found += [Case(dtype=dtype, clip=True, device=device) for dtype in ("float64", "bf16", "complex64")]
    found += [Case("foreach", l2=True, device=device), Case("foreach", clip=True, bad="shard", device=device)]
    return [*found, Case(grads="replicate", missing=True, device=device)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ("rows over 2",)),
        (2, ("2 replicas",)),
        (2, ("HSDP 1x2", "plain", "rows over 2", "2 replicas")),
        (4, ("HSDP 2x2",)),
    ],
    ids=str,
)
def test_ranks_that_share_a_gpu_take_the_step_of_one_process(ranks: int, names: tuple[str, ...]) -> None:
    layouts = [PLACED[name] for name in names]
    found = together(partial(wrong_cases, cases("cuda"), layouts), ranks=ranks, device="cuda")
    assert found == [({},) * ranks]


# -- one rank ------------------------------------------------------------------------------------------

ROWS = Layout("one rank", (1,), (Shard(0),))


def alone(p: Tensor) -> Span | None:
    """The span of a mesh of one rank, which has none because there is nothing to add: here its sums are exchanged."""
    return Span((0,), p.device.type, True) if is_dtensor(p) else None


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def stepped(how: str, clip: float | None, device: str) -> list[Tensor]:
    """Parameters and counts after steps on plain tensors, or on shards with an exchange: eager or captured."""
    sharded = [how != "plain" and ROWS.fits(shape) for shape in LARGE]

    def lay(whole: Tensor, i: int) -> Tensor:
        return ROWS.lay(whole.to(device)) if sharded[i] else whole.to(device, copy=True)

    params = [nn.Parameter(lay(t, i)) for i, t in enumerate(values_of(LARGE, torch.float32))]
    lr = torch.tensor(1e-2, device=device)
    optimizer = Aida(params, lr=lr, clip_norm=clip, weight_decay=0.1, fused=True, capturable=device == "cuda")
    for i, p in enumerate(params):
        p.grad = lay(torch.zeros(p.shape), i)
    graph: Any = None
    with patch("aida._step.sorting.span_of", alone):
        for step in range(12):
            for i, p in enumerate(params):
                local(p.grad).copy_(gradient(LARGE[i], torch.float32, step, i))
            if step == 9:
                local(params[0].grad)[0, 0] = float("nan")
            lr.fill_(1e-2 / (step + 1))
            if how != "captured" or step < 3 or step == 7:
                with no_waiting() if step >= 2 and device == "cuda" else nullcontext():
                    optimizer.step()
                continue
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    optimizer.step()
            graph.replay()
    assert len(optimizer._exchanges) == (how != "plain")
    assert sum(optimizer.skipped().values()) == 1
    found = [*params, *(optimizer.state[p]["step"] for p in params)]
    return [local(t).detach().cpu().clone() for t in found]


def captured_at_once() -> str:
    p = nn.Parameter(ROWS.lay(torch.ones(4, 3, device="cuda")))
    optimizer = Aida([p], capturable=True)
    p.grad = ROWS.lay(torch.ones(4, 3, device="cuda"))
    optimizer.state[p] = {}
    try:
        with patch("aida._step.sorting.span_of", alone), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return str(error)
    return ""


def net(device: str, *, sharded: bool) -> tuple[nn.Module, Aida]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    if sharded:
        mesh = init_device_mesh(device, (1,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    return model, Aida(model.parameters(), lr=1e-2, eps=1e-12, clip_norm=0.3)


def train(model: nn.Module, optimizer: Aida, device: str, first: int, count: int) -> list[Tensor]:
    for step in range(first, first + count):
        x, y = gradient((8, 6), torch.float32, step, 0), gradient((8, 3), torch.float32, step, 1)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    return [local(p).detach().cpu().clone() for p in model.parameters()]


def trained(folder: str, device: str) -> dict[str, Any]:
    """FSDP2: eight steps, also with a checkpoint after three that another model loads, and on plain tensors."""
    model, optimizer = net(device, sharded=True)
    train(model, optimizer, device, 0, 3)
    types = {type(optimizer.state[p][key]) for p in model.parameters() for key in ("exp_avg", "exp_avg_var")}
    dcp.save({"model": model.state_dict(), "opt": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    unbroken = train(model, optimizer, device, 3, 5)
    model, optimizer = net(device, sharded=True)
    content = {"model": model.state_dict(), "opt": get_optimizer_state_dict(model, optimizer)}
    dcp.load(content, checkpoint_id=folder)
    model.load_state_dict(content["model"])
    set_optimizer_state_dict(model, optimizer, content["opt"])
    resumed = train(model, optimizer, device, 3, 5)
    plain = train(*net(device, sharded=False), device, 0, 8)
    return {"types": types, "unbroken": unbroken, "resumed": resumed, "plain": plain}


CLIPS = (None, 0.7)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def one_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    device: str = request.param
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    works: dict[Any, Any] = {"fsdp": partial(trained, str(folder), device)}
    for clip in CLIPS:
        for how in ("plain", "eager", "captured")[: 2 if device == "cpu" else 3]:
            works[how, clip] = partial(stepped, how, clip, device)
    if device == "cuda":
        works["at once"] = captured_at_once
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    found = together(*works.values(), ranks=1, device=device, backend=backend)
    return {"device": device, **{name: outcome for name, (outcome,) in zip(works, found, strict=True)}}


def test_one_rank_under_fsdp2_trains_as_plain_tensors_and_resumes_with_its_bits(one_rank: dict[Any, Any]) -> None:
    found = one_rank["fsdp"]
    assert isinstance(found, dict), found
    assert found["types"] == {DTensor}
    for mine, resumed, plain in zip(found["unbroken"], found["resumed"], found["plain"], strict=True):
        assert torch.equal(mine, resumed)
        assert gap(mine, plain) < 1e-6


@pytest.mark.parametrize("clip", CLIPS)
def test_an_exchange_of_one_rank_changes_nothing(one_rank: dict[Any, Any], clip: float | None) -> None:
    """On a GPU the exchange goes through NCCL, and no step but the first two may synchronize with the device."""
    plain, eager = one_rank["plain", clip], one_rank["eager", clip]
    assert isinstance(plain, list), plain
    assert isinstance(eager, list), eager
    assert all(map(torch.equal, plain, eager))


@pytest.mark.gpu
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("one_rank", ["cuda"], indirect=True)
def test_replays_of_a_step_with_an_all_reduce_equal_eager_steps(one_rank: dict[Any, Any], clip: float | None) -> None:
    eager, captured = one_rank["eager", clip], one_rank["captured", clip]
    assert isinstance(captured, list), captured
    assert all(map(torch.equal, eager, captured))


@pytest.mark.gpu
@pytest.mark.parametrize("one_rank", ["cuda"], indirect=True)
def test_a_capture_of_shards_without_an_eager_step_is_refused_with_the_way_out(one_rank: dict[Any, Any]) -> None:
    assert "eager step" in one_rank["at once"]
