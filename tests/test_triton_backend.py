"""The Triton path: its tables, its kernels under Triton's interpreter, and what only a GPU can show."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from aida import Aida
from aida.backends import Batch, triton
from aida.backends.device_tables import _has_capability
from aida.backends.triton import Triton
from paths import INTERPRETED_PATHS

interpreted = pytest.mark.skipif(not INTERPRETED_PATHS, reason="needs TRITON_INTERPRET=1 before Python starts")

SHAPES = [(1,), (7,), (3, 5), (50, 70), (), (0,)]
REFERENCE: dict[str, Any] = {"foreach": False, "fused": False}


def make_params(device: str, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(s, device=device, dtype=dtype, generator=generator).requires_grad_() for s in shapes]


def train(
    optimizer: Aida, params: list[Tensor], *, gradient_sets: int, schedule: bool, steps: int = 12
) -> list[Tensor]:
    """Steps whose gradients lie in ``gradient_sets`` places in turn, with the events of a real training run."""
    generator = torch.Generator(params[0].device).manual_seed(1)
    sets = [[torch.empty_like(p) for p in params] for _ in range(gradient_sets)]
    for t in range(steps):
        for p, grad in zip(params, sets[t % gradient_sets], strict=True):
            p.grad = grad.normal_(0.3, generator=generator)
        if t == 4:
            params[1].data = params[1].data.clone()  # moved
        if t == 7:
            params[3].grad = None  # sits out
        if schedule:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (t + 1)
        optimizer.step()
    return [p.detach().clone() for p in params] + [optimizer.state[p]["step"].clone() for p in params]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.linalg.vector_norm(a.double() - b.double()) <= tolerance * torch.linalg.vector_norm(b.double())


OPTIONS = [
    {},
    {"clip_norm": 1.0},
    {"clip_norm": 1.0, "weight_decay": 0.1, "decoupled_weight_decay": False},
    {"nonfinite": "raise", "weight_decay": 0.1, "decoupled_weight_decay": False},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True, "projections": 3},
]


@interpreted
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("schedule", [False, True], ids=["constant-lr", "new-lr"])
@pytest.mark.parametrize("gradient_sets", [1, 2, 6])
def test_interpreted_kernels_follow_moving_gradients_and_changing_values(
    gradient_sets: int, schedule: bool, options: dict[str, Any]
) -> None:
    results = []
    for make in (INTERPRETED_PATHS[0].make, lambda groups, **values: Aida(groups, **values, **REFERENCE)):
        params = make_params("cpu")
        groups = [{"params": [p], "lr": 1e-2 * (1 + i)} for i, p in enumerate(params)]
        optimizer = make(groups, eps=1e-12, **options)
        results.append(train(optimizer, params, gradient_sets=gradient_sets, schedule=schedule))
    assert_close(*results, tolerance=1e-12)


@interpreted
def test_interpreted_kernels_count_no_step_that_another_batch_calls_off() -> None:
    a, b = torch.zeros(4, requires_grad=True), torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    groups = [{"params": [a], "nonfinite": "raise"}, {"params": [b], "nonfinite": "skip"}]
    optimizer = INTERPRETED_PATHS[0].make(groups)
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    optimizer.step()
    a.grad = torch.full_like(a, float("nan"))
    with pytest.raises(RuntimeError, match=r"0\.0"):
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in (a, b)] == [1, 1]


@interpreted
def test_interpreted_kernels_see_betas_that_change_in_place() -> None:
    found = []
    for make in (INTERPRETED_PATHS[0].make, lambda params, **values: Aida(params, **values, **REFERENCE)):
        p, beta1 = torch.zeros(4, dtype=torch.float64, requires_grad=True), torch.tensor(0.9, dtype=torch.float64)
        optimizer = make([p], lr=0.1, betas=(beta1, torch.tensor(0.999, dtype=torch.float64)))
        p.grad = torch.empty_like(p)
        for t in range(4):
            p.grad.copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]) / (t + 1))
            if t == 2:
                beta1.fill_(0.1)
            optimizer.step()
        found.append([p.detach(), optimizer.state[p]["exp_avg"]])
    assert_close(*found, tolerance=1e-12)


def test_tables_are_sent_with_the_parameters_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is recorded on the current device: of another one it would tell nothing of the copy."""
    order: list[str] = []

    class Guard:
        def __init__(self, device: torch.device) -> None: ...

        def __enter__(self) -> None:
            order.append("device")

        def __exit__(self, *exc: object) -> None: ...

    def prepare(self: Triton, batch: Batch) -> None:
        order.append("tables")
        raise StopIteration

    monkeypatch.setattr(triton, "_on", Guard)
    monkeypatch.setattr(Triton, "_prepare", prepare)
    with pytest.raises(StopIteration):
        Triton().reduce(Batch(params=[torch.zeros(1)]))
    assert order == ["device", "tables"]


def test_only_nvidias_devices_have_a_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda, least = torch.device("cuda"), (9, 0)
    assert _has_capability(cuda, least)
    assert not _has_capability(cuda, (9, 1))
    assert not _has_capability(torch.device("cpu"), least)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not _has_capability(cuda, least)


# -- on a GPU ------------------------------------------------------------------------------------------

LAYERS = [(64, 3, 3, 3), (64,), (300, 701), (), (1,), (0,), (512, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
    ids=str,
)
def test_fused_equals_reference_on_the_gpu(dtype: torch.dtype, tolerance: float, options: dict[str, Any]) -> None:
    results = []
    for flags in ({"fused": True}, REFERENCE):
        params = make_params("cuda", dtype, LAYERS)
        optimizer = Aida(params, lr=1e-2, eps=1e-10, **options, **flags)
        results.append(train(optimizer, params, gradient_sets=2, schedule=True, steps=50))
    assert_close(*results, tolerance=tolerance)


@pytest.mark.gpu
def test_two_runs_agree_bitwise_on_the_gpu() -> None:
    runs = []
    for _ in range(2):
        params = make_params("cuda", torch.float32, LAYERS)
        runs.append(train(Aida(params, fused=True), params, gradient_sets=2, schedule=False))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS[:3], ids=lambda options: "-".join(options) or "plain")
def test_graph_replays_equal_eager_steps_bitwise(options: dict[str, Any]) -> None:
    """With eager steps in between, a new learning rate in place, and a NaN gradient in a replay."""
    results = []
    for captured in (False, True):
        params = make_params("cuda", torch.float32, LAYERS)
        lr = torch.tensor(1e-2, device="cuda")
        optimizer = Aida(params, lr=lr, capturable=True, **options)
        for p in params:
            p.grad = torch.empty_like(p)
        generator = torch.Generator("cuda").manual_seed(2)
        graph: torch.cuda.CUDAGraph | None = None
        for t in range(14):
            for p in params:
                p.grad.normal_(generator=generator)
            if t == 9:
                params[2].grad[0, 0] = float("nan")
            lr.fill_(1e-2 / (t + 1))
            if not captured or t < 3 or t == 7:
                optimizer.step()
                continue
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay()
        results.append([p.detach().clone() for p in params] + [optimizer.state[p]["step"].clone() for p in params])
        assert sum(optimizer.skipped().values()) == 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_a_capture_without_an_eager_step_is_refused_with_the_way_out() -> None:
    params = make_params("cuda", torch.float32, LAYERS)
    optimizer = Aida(params, capturable=True)
    for p in params:
        p.grad = torch.zeros_like(p)
        optimizer.state[p] = {}
    with pytest.raises(RuntimeError, match="eager step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    torch.cuda.synchronize()


@contextmanager
def no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"lr": torch.tensor(1e-3)}], ids=["plain", "clip", "lr"])
def test_a_step_never_waits_for_the_device(options: dict[str, Any]) -> None:
    params = make_params("cuda", torch.float32, LAYERS)
    optimizer = Aida(params, fused=True, **options)
    gradients = [[torch.randn_like(p) for p in params] for _ in range(7)]
    gradients[5][2][0, 0] = float("inf")  # a skipped tensor is counted on the device
    for t, grads in enumerate(gradients):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        if t < 2:
            optimizer.step()
        else:
            with no_waiting():
                optimizer.step()
    assert sum(optimizer.skipped().values()) == 1


@pytest.mark.gpu
def test_a_fused_step_takes_no_parameter_sized_temporary() -> None:
    params = make_params("cuda", torch.float32, [(4096, 4096)])
    optimizer = Aida(params, fused=True, clip_norm=1.0, weight_decay=0.1, decoupled_weight_decay=False)
    params[0].grad = torch.randn_like(params[0])
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 64 * 1024


@pytest.mark.gpu
def test_grad_scaler_and_the_fused_step_agree_with_unscaled_training() -> None:
    results = []
    for scaled in (False, True):
        params = make_params("cuda", torch.float32, LAYERS)
        optimizer = Aida(params, fused=True, clip_norm=2.0)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=scaled)
        generator = torch.Generator("cuda").manual_seed(3)
        for t in range(6):
            if scaled and t == 3:
                kept = [p.detach().clone() for p in params]
                steps = [optimizer.state[p]["step"].clone() for p in params]
                optimizer.zero_grad()
                scaler.scale(sum((p * float("inf")).sum() for p in params)).backward()
                scaler.step(optimizer)
                scaler.update()
                assert all(torch.equal(a, p) for a, p in zip(kept, params, strict=True))
                assert all(torch.equal(s, optimizer.state[p]["step"]) for s, p in zip(steps, params, strict=True))
                assert not optimizer.skipped()
            optimizer.zero_grad()
            loss = sum((p * torch.randn(p.shape, device="cuda", generator=generator)).sum() for p in params)
            scaler.scale(loss).backward()
            before = [p.grad.clone() for p in params]
            scaler.step(optimizer)
            scaler.update()
            assert all(torch.equal(a, p.grad) for a, p in zip(before, params, strict=True))
        results.append([p.detach().clone() for p in params])
    assert_close(results[1], results[0], tolerance=1e-5)


@pytest.mark.gpu
def test_channels_last_may_come_after_the_first_step() -> None:
    results = []
    for turn in (False, True):
        params = make_params("cuda", torch.float32, [(16, 8, 3, 3)])
        optimizer = Aida(params, fused=True)
        generator = torch.Generator("cuda").manual_seed(4)
        for t in range(6):
            if turn and t == 3:
                params[0].data = params[0].data.to(memory_format=torch.channels_last)
            grad = torch.randn(params[0].shape, device="cuda", generator=generator)
            params[0].grad = grad
            optimizer.step()
        results.append([params[0].detach().clone()])
    assert_close(*results, tolerance=1e-6)


@pytest.mark.gpu
def test_tensors_beyond_32_bit_indices() -> None:
    size = 2**31 + 4097
    if torch.cuda.mem_get_info()[0] < 14 * size:
        pytest.skip("needs 30 GB of GPU memory")
    param = torch.zeros(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    param.grad = torch.zeros_like(param)
    param.grad[-3:] = 1.0
    optimizer = Aida([param], lr=1.0, fused=True, projections=0, eps=1.0)
    optimizer.step()
    # one step: m = 0.1 g, v = 0.001 (0.9 g)^2 + 1, so p = -lr g / sqrt(v / 0.001)
    wanted = -1.0 / ((0.001 * 0.81 + 1.0) / 0.001) ** 0.5
    assert torch.allclose(param.detach()[-3:].float(), torch.full((3,), wanted, device="cuda"), rtol=1e-2)
    assert param.detach()[: size - 3].abs().max() == 0


@pytest.mark.gpu
def test_deepcopy_of_an_optimizer_that_has_stepped_on_the_gpu() -> None:
    params = make_params("cuda", torch.float32, LAYERS)
    optimizer = Aida(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    twin.step()
    assert all(int(state["step"]) == 2 for state in twin.state.values())
    assert all(int(optimizer.state[p]["step"]) == 1 for p in params)
