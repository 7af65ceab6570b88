"""The probe against NumPy, against the updates themselves, and against the run it must leave alone."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from aida import Aida
from aida.catalog import catalog, find, reading_for
from aida.readings import Reading, outer_eps
from aida.rule import mutual_projections
from aida.stepsizes import LayerStepsizes, StepsizeProbe
from aida.stepsizes import _histogram as histogram
from aida.stepsizes import _pieces as tensor_pieces

ADAPTIVE = [name for name, entry in catalog().items() if entry.reading.stepsize is not None]
FIELDS = ("mean", "std", "min", "max", "at_bound", "cosine", "scale_m", "scale_g", "weight_norm", "update_norm", "lost")
LEVELS = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(144, 6)).to(dtype)


def backward(net: nn.Module, step: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(step)
    dtype = next(net.parameters()).dtype
    images = torch.randn(8, 1, 8, 8, generator=rng).to(dtype)
    loss = net(images).square().mean()
    net.zero_grad()
    loss.backward()
    return loss


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 1) -> None:
    for step in range(first, first + steps):
        backward(net, step)
        optimizer.step()


def measured(optimizer: torch.optim.Optimizer, net: nn.Module, steps: int = 5, **options) -> list[LayerStepsizes]:
    probe = StepsizeProbe(optimizer, net.named_parameters(), every=steps, quantiles=LEVELS, **options)
    train(net, optimizer, steps)
    assert probe.last is not None
    return list(probe.last.layers)


def numbers(record: LayerStepsizes) -> dict[str, float]:
    return {field: value for field in FIELDS if (value := getattr(record, field)) is not None}


def check(record: LayerStepsizes, stepsizes: np.ndarray, rtol: float = 1e-5) -> None:
    """Every statistic of a record against NumPy's over all stepsizes of the layer."""
    flat = np.sort(stepsizes.astype(np.float64).ravel())
    assert record.elements == flat.size
    for name in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(
            getattr(record, name), getattr(flat, name)(), rtol, atol=1e-10 * flat[-1], err_msg=name
        )
    for level, value in record.quantiles:
        wanted = flat[math.floor(level * (flat.size - 1))]
        error = histogram.RELATIVE_ERROR * wanted * (1 + rtol) + 1e-10 * flat[-1]
        assert abs(value - wanted) <= error, (level, value, wanted)
    if record.bound is not None:
        assert flat[-1] <= record.bound * (1 + rtol)
        assert record.at_bound == pytest.approx((flat >= 0.99 * record.bound).mean(), abs=1 / flat.size)


# -- the values --------------------------------------------------------------------------------------

TORCH = {
    "torch.Adam": lambda p: torch.optim.Adam(p, eps=1e-6),
    "torch.Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "torch.AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    "torch.NAdam": torch.optim.NAdam,
}
OURS = {name: find(name).build for name in ("aida", "adabelief", "adabelief-star", "adam-plus", "yogi")}


@pytest.mark.parametrize("build", [*TORCH.values(), *OURS.values()], ids=[*TORCH, *OURS])
def test_statistics_are_those_of_the_papers_footnote(build):
    net = model()
    optimizer = build(net.parameters())
    records = measured(optimizer, net)
    group = optimizer.param_groups[0]
    outer = 0.0 if isinstance(optimizer, Aida) else group["eps"]
    for record, (name, p) in zip(records, net.named_parameters(), strict=True):
        state = optimizer.state[p]
        key = next(k for k in ("max_exp_avg_sq", "exp_avg_sq", "exp_avg_var") if k in state)
        variance = state[key].numpy().astype(np.float64)
        check(record, 1 / (np.sqrt(variance / (1 - group["betas"][1] ** 5)) + outer))
        assert (record.layer, record.step, record.shape) == (name, 5, tuple(p.shape))


@pytest.mark.parametrize("name", ADAPTIVE)
def test_stepsize_is_what_multiplies_lr_and_the_corrected_momentum(name):
    net = model(torch.float64)
    optimizer = find(name).build(net.parameters(), weight_decay=0.0)
    train(net, optimizer, 6)
    probe = StepsizeProbe(optimizer, net.named_parameters(), every=1, quantiles=LEVELS)
    before = [p.detach().clone() for p in net.parameters()]
    train(net, optimizer, 1, first=7)
    group = optimizer.param_groups[0]
    for record, p, old in zip(probe.last.layers, net.parameters(), before, strict=True):
        corrected = optimizer.state[p]["exp_avg"] / (1 - group["betas"][0] ** 7)
        check(record, ((old - p.detach()) / (group["lr"] * corrected)).numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "fromage"])
def test_an_optimizer_without_stepsizes_gives_no_records(name):
    net, records = model(), []
    optimizer = find(name).build(net.parameters())
    StepsizeProbe(optimizer, net.named_parameters(), every=1, sink=records.append)
    train(net, optimizer, 2)
    assert records == []


def test_an_unknown_optimizer_is_read_by_a_reading_of_ones_own():
    class Mine(torch.optim.RMSprop):
        pass

    net = model()
    optimizer = Mine(net.parameters())
    with pytest.raises(TypeError, match="Reading of your own"):
        StepsizeProbe(optimizer, net.named_parameters())
    square = outer_eps("square_avg")
    mine = Reading(
        square.about,
        square.eps,
        square.weight_decay,
        square.keys,
        lambda c, t, g: (c[0].sqrt() + g["eps"]).reciprocal_(),
    )
    records = measured(optimizer, net, reading=mine)
    state = optimizer.state[net[0].weight]["square_avg"]
    check(records[0], 1 / (state.sqrt().numpy() + 1e-8))


# -- the run stays what it is ------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(catalog()))
def test_trajectory_and_random_numbers_are_bitwise_those_without_a_probe(name):
    ends = []
    for probed in (False, True):
        net = model()
        optimizer = find(name).build(net.parameters())
        if probed:
            StepsizeProbe(optimizer, net.named_parameters(), every=1)
        train(net, optimizer, 8)
        ends.append(
            (list(net.parameters()), [s for p in net.parameters() for s in optimizer.state[p].values()], torch.rand(4))
        )
    for one, other in zip(*ends, strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes in memory of its own."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.elements = 0
        self._known = {t.untyped_storage().data_ptr() for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self._known:
                self.elements = max(self.elements, t.numel())
        return found


def test_no_temporary_is_larger_than_a_piece(monkeypatch):
    monkeypatch.setattr(tensor_pieces, "PIECE", 10_000)
    p = nn.Parameter(torch.randn(500, 200))
    p.grad = torch.randn(500, 200)
    optimizer = Aida([p], weight_decay=0.1, decoupled_weight_decay=False)
    optimizer.step()
    probe = StepsizeProbe(optimizer, [("p", p)])
    with Largest([p, p.grad, *optimizer.state[p].values()]) as seen:
        probe.measure()
    assert 0 < seen.elements <= 10_000


def test_a_layer_in_many_pieces_reads_as_in_one(monkeypatch):
    readings = []
    for piece in (1 << 20, 7):
        monkeypatch.setattr(tensor_pieces, "PIECE", piece)
        net = model()
        readings.append(measured(Aida(net.parameters(), weight_decay=0.1, clip_norm=0.1), net))
    for whole, cut in zip(*readings, strict=True):
        assert numbers(cut) == pytest.approx(numbers(whole), rel=1e-5)
        assert cut.quantiles == whole.quantiles


@pytest.mark.parametrize("name", ADAPTIVE)
def test_layers_read_together_read_as_one_by_one(name, monkeypatch):
    # as on a GPU, where layers of one shape are stacked
    torch.manual_seed(0)
    named = [(str(i), nn.Parameter(torch.randn(6, 5))) for i in range(4)] + [("last", nn.Parameter(torch.randn(7)))]
    optimizer = find(name).build([p for _, p in named], weight_decay=0.01)
    for step in range(5):
        for i, (_, p) in enumerate(named):
            p.grad = torch.randn_like(p) if step >= i else None
        optimizer.step()
    probe = StepsizeProbe(optimizer, named, quantiles=LEVELS)
    one_by_one = probe.measure()
    for piece in (1 << 20, 60):  # all rows at once, and two at a time
        monkeypatch.setattr(tensor_pieces, "HOSTS", ())
        monkeypatch.setattr(tensor_pieces, "PIECE", piece)
        together = probe.measure()
        assert sorted(layer.layer for layer in together.layers) == sorted(name for name, _ in named)
        for one, other in zip(one_by_one.layers, together.layers, strict=True):
            assert numbers(other) == pytest.approx(numbers(one), rel=1e-5, abs=1e-7)
            assert dict(other.quantiles) == pytest.approx(dict(one.quantiles), rel=0.02)


def test_of_a_sharded_tensor_the_own_shard_is_read(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no distributed package")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        whole = torch.randn(8, 3)
        p = nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)]))
        optimizer = torch.optim.Adam([p], foreach=False)
        p.grad = torch.ones_like(p)
        probe = StepsizeProbe(optimizer, [("p", p)], every=1, quantiles=LEVELS)
        optimizer.step()
        check(probe.last.layers[0], 1 / (np.ones((8, 3)) + 1e-8))
    finally:
        distributed.destroy_process_group()


# -- all kinds of tensors ----------------------------------------------------------------------------


def test_groups_keep_their_own_values_and_bounds():
    net = model()
    groups = [{"params": net[0].parameters(), "eps": 1e-6, "lr": 0.5}, {"params": net[3].parameters()}]
    records = measured(Aida(groups), net)
    assert [record.group for record in records] == [0, 0, 1, 1]
    assert [record.hyper["eps"] for record in records] == [1e-6, 1e-6, 1e-8, 1e-8]
    assert [record.hyper["lr"] for record in records] == [0.5, 0.5, 1e-3, 1e-3]
    assert records[0].bound == pytest.approx(math.sqrt(1e-3 / 1e-6))
    assert records[2].bound == pytest.approx(math.sqrt(1e-3 / 1e-8))


def test_late_and_foreign_parameters_come_when_they_have_a_state():
    net = model()
    optimizer = Aida(net[0].parameters())
    probe = StepsizeProbe(optimizer, net.named_parameters(), every=1)
    train(net, optimizer, 2)
    assert [layer.layer for layer in probe.last.layers] == ["0.weight", "0.bias"]
    optimizer.add_param_group({"params": list(net[3].parameters())})
    probe.measure()
    assert len(probe.last.layers) == 2
    train(net, optimizer, 3)
    assert [layer.layer for layer in probe.last.layers] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    variance = optimizer.state[net[3].weight]["exp_avg_var"].numpy()
    check(probe.last.layers[2], 1 / np.sqrt(variance / (1 - 0.999**3)))  # its own step count, not the run's


def test_a_tensor_that_never_stepped_gives_no_record():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    p.grad, q.grad = torch.ones(3), torch.full((3,), math.nan)
    optimizer = Aida([p, q])
    probe = StepsizeProbe(optimizer, [("p", p), ("q", q)], every=1)
    optimizer.step()
    assert [layer.layer for layer in probe.last.layers] == ["p"]


@pytest.mark.parametrize("name", ["aida", "adabelief", "msvag"])
def test_bf16_parameters_are_read_from_their_float32_state(name):
    net = model(torch.bfloat16)
    optimizer = find(name).build(net.parameters())
    for record, p in zip(measured(optimizer, net), net.parameters(), strict=True):
        state = {key: value.float() for key, value in optimizer.state[p].items()}
        reading = reading_for(optimizer)
        group = optimizer.param_groups[0]
        wanted = reading.stepsize([state[key].flatten() for key in reading.keys(group)], state["step"], group)
        check(record, wanted.numpy())


@pytest.mark.parametrize("kind", ["channels-last", "strided", "complex", "conjugate", "scalar", "mixed"])
def test_layouts_and_complex_numbers_are_read_element_by_element(kind):
    torch.manual_seed(0)
    tensors = {
        "channels-last": torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last),
        "strided": torch.randn(6, 8)[:, ::2],
        "complex": torch.randn(5, 3, dtype=torch.complex64),
        "conjugate": torch.randn(5, 3, dtype=torch.complex64),
        "scalar": torch.randn(()),
        "mixed": torch.randn(4, 3, 5, 2),
    }
    p = nn.Parameter(tensors[kind])
    optimizer = Aida([p], weight_decay=0.1, decoupled_weight_decay=False)
    probe = StepsizeProbe(optimizer, [("p", p)], every=1, quantiles=LEVELS)
    for _ in range(3):
        grad = torch.randn_like(p)
        if kind == "mixed":
            grad = grad.to(memory_format=torch.channels_last)
        p.grad = grad.conj() if kind == "conjugate" else grad
        optimizer.step()
    variance = (
        torch.view_as_real(optimizer.state[p]["exp_avg_var"]) if p.is_complex() else optimizer.state[p]["exp_avg_var"]
    )
    check(probe.last.layers[0], 1 / np.sqrt(variance.numpy() / (1 - 0.999**3)))


def test_weights_only_leaves_biases_out():
    net = model()
    assert [r.layer for r in measured(Aida(net.parameters()), net, weights_only=True)] == ["0.weight", "3.weight"]


def test_tensor_values_are_recorded_as_numbers():
    net = model()
    records = measured(Aida(net.parameters(), lr=torch.tensor(0.25)), net)
    assert records[0].hyper["lr"] == 0.25


# -- cosine and scales -------------------------------------------------------------------------------


@pytest.mark.parametrize("projections", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "values",
    [{}, {"weight_decay": 0.3, "decoupled_weight_decay": False},
     {"maximize": True, "weight_decay": 0.3, "decoupled_weight_decay": False},
     {"clip_norm": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": False},
     {"weight_decay": 0.3, "decoupled_weight_decay": True}],
    ids=str,
)  # fmt: skip
def test_cosine_and_scales_are_those_of_the_gradient_the_step_used(projections, values):
    net = model(torch.float64)
    optimizer = Aida(net.parameters(), projections=projections, **values)
    train(net, optimizer, 3)
    probe = StepsizeProbe(optimizer, net.named_parameters(), every=1, weights_only=True)
    old = {p: p.detach().clone() for p in net.parameters()}
    train(net, optimizer, 1, first=4)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters()))
    clip = min(1.0, values["clip_norm"] / (norm + 1e-6)) if "clip_norm" in values else 1.0
    l2 = 0.0 if values.get("decoupled_weight_decay", True) else values["weight_decay"]
    for layer, p in zip(probe.last.layers, (net[0].weight, net[3].weight), strict=True):
        g = clip * (-p.grad if values.get("maximize") else p.grad) + l2 * old[p]
        m = optimizer.state[p]["exp_avg"]
        assert layer.cosine == pytest.approx(float((m * g).sum() / (m.norm() * g.norm())), rel=1e-9)
        projected_m, projected_g = mutual_projections(m, g, projections, 1e-20)
        torch.testing.assert_close(
            layer.scale_m * m - layer.scale_g * g, projected_m - projected_g, rtol=1e-8, atol=1e-12
        )


def test_scales_know_closures_and_the_loss_scale():
    found = []
    for kind in ("plain", "closure", "scaler"):
        net = model()
        optimizer = Aida(net.parameters(), clip_norm=0.01)
        probe = StepsizeProbe(optimizer, net.named_parameters(), every=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == "scaler")
        for step in range(1, 4):
            if kind == "closure":
                optimizer.step(partial(backward, net, step))
            else:
                rng = torch.Generator().manual_seed(step)
                net.zero_grad()
                scaler.scale(net(torch.randn(8, 1, 8, 8, generator=rng)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        found.append([(layer.cosine, layer.scale_m, layer.scale_g) for layer in probe.last.layers])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-4)


def test_a_skipped_tensor_has_no_cosine_but_keeps_its_stepsizes():
    net = model()
    optimizer = Aida(net.parameters())
    probe = StepsizeProbe(optimizer, net.named_parameters(), every=1)
    train(net, optimizer, 2)
    before = probe.last.layers[0]
    backward(net, 3)
    net[0].weight.grad[0, 0, 0, 0] = math.inf
    optimizer.step()
    skipped, others = probe.last.layers[0], probe.last.layers[1:]
    assert skipped.cosine is None
    assert skipped.scale_m is None
    assert skipped.mean == before.mean
    assert all(layer.cosine is not None for layer in others)


def test_other_optimizers_have_no_scales():
    net = model()
    assert all(record.cosine is None for record in measured(torch.optim.Adam(net.parameters()), net))
