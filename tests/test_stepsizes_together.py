"""Many layers at once, as on a GPU: read as one by one, and in a number of operations that no layer adds to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from aida import Aida
from aida.catalog import find
from aida.stepsizes import LayerStepsizes, StepsizeProbe
from aida.stepsizes import _histogram as histogram
from aida.stepsizes import _pieces as tensor_pieces

FIELDS = (
    "elements", "mean", "std", "min", "max", "at_bound", "cosine", "scale_m", "scale_g", "weight_norm",
    "update_norm", "lost",
)  # fmt: skip


@pytest.fixture
def together(monkeypatch):
    """Read layers of the CPU as a GPU's are read."""
    return lambda: monkeypatch.setattr(tensor_pieces, "HOSTS", ())


def stepped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 3) -> None:
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng).to(p)
        optimizer.step()


def numbers(record: LayerStepsizes) -> dict[str, float]:
    return {field: value for field in FIELDS if (value := getattr(record, field)) is not None}


def all_kinds() -> list[nn.Parameter]:
    torch.manual_seed(0)
    channels_last = {"memory_format": torch.channels_last}
    tensors = [
        *(torch.randn(shape) for shape in [(64,), (8, 8), (8, 8), (4, 2, 8), (1,), (), (30, 20), (64,)]),
        *(torch.randn(4, 3, 5, 2).to(**channels_last) for _ in range(2)),
        torch.randn(4, 3, 5, 2),
        torch.randn(6, 8)[:, ::2],
        *(torch.randn(shape, dtype=torch.complex64) for shape in [(5, 3), (15,), (4,)]),
        *(torch.randn(shape, dtype=torch.float64) for shape in [(5, 3), (8, 8)]),
        *(torch.randn(shape, dtype=torch.bfloat16) for shape in [(5, 3), (8, 8), (8, 8)]),
    ]
    return [nn.Parameter(t) for t in tensors]


@pytest.mark.parametrize("piece", [1 << 22, 100], ids=["one piece", "many pieces"])
@pytest.mark.parametrize(
    "values", [{}, {"weight_decay": 0.1, "clip_norm": 1.0, "decoupled_weight_decay": False}], ids=str
)
def test_layers_of_all_kinds_read_together_as_one_by_one(values, piece, together, monkeypatch):
    params = all_kinds()
    optimizer = Aida(
        [{"params": params[::3]}, {"params": [p for i, p in enumerate(params) if i % 3], "lr": 0.1}], **values
    )
    stepped(optimizer, params)
    probe = StepsizeProbe(optimizer, [(str(i), p) for i, p in enumerate(params)])
    alone = probe.measure(3).layers
    together()
    monkeypatch.setattr(tensor_pieces, "PIECE", piece)
    for one, other in zip(alone, probe.measure(3).layers, strict=True):
        assert (one.layer, one.shape, one.group, one.hyper) == (other.layer, other.shape, other.group, other.hyper)
        assert numbers(other) == pytest.approx(numbers(one), rel=1e-5, abs=1e-9), one.layer
        assert dict(other.quantiles) == pytest.approx(dict(one.quantiles)), one.layer


class Operations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["aida", "adabelief", "adam"])
def test_more_layers_of_the_same_shapes_take_no_more_operations(name, together):
    together()
    needed = []
    for times in (2, 7):
        params = [nn.Parameter(torch.randn(shape)) for shape in [(8, 4), (32,), (5, 3, 3)] for _ in range(times)]
        optimizer = find(name).build(params, weight_decay=0.01)
        stepped(optimizer, params)
        probe = StepsizeProbe(optimizer, [(str(i), p) for i, p in enumerate(params)])
        probe.measure(3)
        with Operations() as seen:
            probe.measure(3)
        needed.append(seen.number)
    assert needed[0] == needed[1] > 0


def test_histograms_of_many_layers_are_those_of_each():
    sizes = [50, 50, 9, 1]
    values = 10 ** (30 * torch.rand(sum(sizes), generator=torch.Generator().manual_seed(0)) - 15)
    alone = [table for layer in values.split(sizes) for table in histogram.count(layer, [len(layer)])]
    assert torch.equal(torch.cat(histogram.count(values, sizes)), torch.cat(alone))


@pytest.mark.parametrize("side_by_side", [False, True], ids=["alone", "together"])
def test_a_layer_that_diverged_is_recorded_as_such_and_spoils_no_other(side_by_side, together):
    p, q = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(12))
    optimizer = Aida([p, q], nonfinite="propagate")
    p.grad, q.grad = torch.full((4, 3), math.nan), torch.arange(12.0)
    optimizer.step()
    if side_by_side:
        together()
    diverged, sound = StepsizeProbe(optimizer, [("p", p), ("q", q)]).measure(1).layers
    assert all(
        map(math.isnan, (diverged.mean, diverged.std, diverged.min, diverged.max, *dict(diverged.quantiles).values()))
    )
    assert diverged.cosine is None
    assert sound.min <= dict(sound.quantiles)[0.5] <= sound.max
    assert sound.cosine == pytest.approx(1)
