"""What the probe says about updates: their norm beside that of the weights, and those that rounding removes."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from aida import Aida
from aida.catalog import catalog, find
from aida.readings import outer_eps
from aida.stepsizes import LayerStepsizes, StepsizeProbe
from aida.stepsizes.sinks import JsonLines, read_jsonl

BUILD = {name: entry.build for name, entry in catalog().items() if entry.reading.stepsize is not None}
BUILD |= {"torch.RAdam": torch.optim.RAdam, "torch.Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True)}


def steps(p: nn.Parameter, optimizer: torch.optim.Optimizer, number: int) -> tuple[torch.Tensor, LayerStepsizes]:
    """The parameter before the last step, and the record after it."""
    probe = StepsizeProbe(optimizer, [("p", p)], every=number)
    rng = torch.Generator().manual_seed(0)
    for _ in range(number):
        before = p.detach().clone()
        p.grad = torch.randn(p.shape, generator=rng, dtype=p.dtype)
        optimizer.step()
    assert probe.last is not None
    return before, probe.last.layers[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", BUILD)
def test_the_norms_are_those_of_the_parameter_and_of_its_change(name, dtype):
    p = nn.Parameter(torch.randn(6, 5, dtype=dtype, generator=torch.Generator().manual_seed(1)))
    before, record = steps(p, BUILD[name]([p]), 7)
    after = p.detach()
    if decay := record.hyper["weight_decay"]:  # AdamW's default
        before = before * (1 - record.hyper["lr"] * decay)
    assert record.weight_norm == pytest.approx(float(after.norm()))
    assert record.update_norm == pytest.approx(float((before - after).norm()), rel=1e-6)
    assert record.update_ratio == pytest.approx(record.update_norm / record.weight_norm)
    assert record.lost is None


def test_lr_and_beta1_can_be_tensors():
    norms = []
    for lr, *betas in ((0.01, 0.9, 0.999), (torch.tensor([0.01]), torch.tensor(0.9), torch.tensor(0.999))):
        p = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        _, record = steps(p, Aida([p], lr=lr, betas=tuple(betas)), 4)
        norms.append((record.update_norm, record.lost))
    assert norms[1] == pytest.approx(norms[0])


def test_an_optimizer_with_another_update_has_no_norms():
    p = nn.Parameter(torch.ones(4))
    _, nadam = steps(p, torch.optim.NAdam([p]), 2)
    _, rmsprop = steps_read(outer_eps("square_avg"))
    for record in (nadam, rmsprop):
        assert (record.weight_norm, record.update_norm, record.update_ratio, record.lost) == (None,) * 4


def steps_read(reading):
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.RMSprop([p])
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.99)
    p.grad = torch.ones(4)
    optimizer.step()
    return p, StepsizeProbe(optimizer, [("p", p)], reading=reading).measure().layers[0]


def test_a_parameter_of_zeros_has_no_ratio():
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.zeros(3)
    optimizer = Aida([p])
    optimizer.step()
    record = StepsizeProbe(optimizer, [("p", p)]).measure().layers[0]
    assert (record.weight_norm, record.update_norm, record.update_ratio) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("name", "dtype"),  # torch's AdamW keeps its state in fp16 too, in which eps is zero
    [(name, torch.bfloat16) for name in ("aida", "adabelief", "adamw")] + [("aida", torch.float16)],
)
def test_a_lost_update_is_one_that_left_its_element_as_it_was(name, dtype):
    # updates are about lr: lost on ones and tens, not on small weights; without a gradient nothing is lost
    p = nn.Parameter(torch.tensor([1.0, 10.0, 1e-3, 1e-4, 1e-3, 1.0]).to(dtype))
    optimizer = find(name).build([p], lr=1e-4, weight_decay=0.0)
    probe = StepsizeProbe(optimizer, [("p", p)], every=1)
    for _ in range(3):
        before = p.detach().clone()
        p.grad = torch.tensor([2.0, -1.0, 1.0, 3.0, 1.0, 0.0], dtype=dtype)
        optimizer.step()
    assert torch.equal(before == p, torch.tensor([True, True, False, False, False, True]))
    assert probe.last.layers[0].lost == pytest.approx(2 / 6)


def test_files_of_older_versions_are_read_without_norms(tmp_path):
    p = nn.Parameter(torch.ones(4))
    _, record = steps(p, Aida([p]), 1)
    path = tmp_path / "a.jsonl"
    with JsonLines(path) as sink:
        sink(record)
    fields = json.loads(path.read_text())
    assert read_jsonl(path).layers == (record,)
    for name in ("weight_norm", "update_norm", "lost"):
        del fields[name]
    path.write_text(json.dumps(fields) + "\n")
    (old,) = read_jsonl(path).layers
    assert (old.mean, old.update_ratio, old.lost) == (record.mean, None, None)
