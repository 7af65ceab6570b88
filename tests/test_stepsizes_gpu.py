"""The probe on a GPU: the same numbers, one wait a measurement, and steps that a CUDA graph replays."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from aida.catalog import catalog, find
from aida.stepsizes import StepsizeProbe
from aida.stepsizes import _histogram as histogram

pytestmark = pytest.mark.gpu

ADAPTIVE = [name for name, entry in catalog().items() if entry.reading.stepsize is not None]
FIELDS = ("mean", "std", "min", "max", "at_bound", "cosine", "scale_m", "scale_g")


def numbers(record) -> dict[str, float]:
    return {field: value for field in FIELDS if (value := getattr(record, field)) is not None}


def trained(name: str, **values):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.GELU(), nn.Flatten(), nn.Linear(64 * 36, 500)).cuda()
    optimizer = find(name).build(net.parameters(), **values)
    for step in range(4):
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad()
        net(images).square().mean().backward()
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("name", ADAPTIVE)
def test_numbers_are_those_of_the_cpu(name):
    net, optimizer = trained(name, weight_decay=0.01)
    there = StepsizeProbe(optimizer, net.named_parameters()).measure(4)
    host = copy.deepcopy(net).cpu()
    for p, q in zip(host.parameters(), net.parameters(), strict=True):
        p.grad = q.grad.cpu()
    copied = find(name).build(host.parameters(), weight_decay=0.01)
    copied.load_state_dict(optimizer.state_dict())
    here = StepsizeProbe(copied, host.named_parameters()).measure(4)
    for one, other in zip(there.layers, here.layers, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-4, abs=1e-6)
        assert dict(one.quantiles) == pytest.approx(dict(other.quantiles), rel=0.02)


def test_histograms_of_layers_long_and_short_are_those_of_the_cpu():
    sizes = [70_000, 66_000, 500, 64, 64]
    values = 10 ** (40 * torch.rand(sum(sizes), generator=torch.Generator().manual_seed(0)) - 20)
    values[[0, -1]] = torch.nan
    there = torch.cat(histogram.count(values.cuda(), sizes))
    assert torch.equal(there.cpu().long(), torch.cat(histogram.count(values, sizes)))


@pytest.mark.parametrize("name", ["aida", "adabelief", "adam"])
def test_a_measurement_waits_for_the_device_once(name):
    net, optimizer = trained(name, weight_decay=0.01)
    probe = StepsizeProbe(optimizer, net.named_parameters())
    probe.measure()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            probe.measure()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in seen if "synchroniz" in str(w.message)]) == 1, [str(w) for w in seen]


def test_deterministic_algorithms_do_not_mind():
    net, optimizer = trained("aida")
    probe = StepsizeProbe(optimizer, net.named_parameters())
    plain = probe.measure()
    torch.use_deterministic_algorithms(True)
    try:
        assert probe.measure() == plain
    finally:
        torch.use_deterministic_algorithms(False)


def test_between_replays_the_state_is_read_as_it_is_then():
    values = {"capturable": True, "weight_decay": 0.01}
    p, q = (nn.Parameter(torch.ones(300, 40, device="cuda")) for _ in range(2))
    gradient = torch.randn(300, 40, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    p.grad, q.grad = gradient.clone(), gradient.clone()
    graphed, eager = find("aida").build([p], **values), find("aida").build([q], **values)
    records = []
    probe = StepsizeProbe(graphed, [("p", p)], every=1, sink=records.append)
    other = StepsizeProbe(eager, [("p", q)], every=1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            graphed.step()
            eager.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    assert len(records) == 4  # the recorded step did not happen, and was not measured
    for step in (3, 4, 5):
        graph.replay()
        eager.step()
        found, wanted = probe.measure(step), other.last
        assert numbers(found.layers[0]) == pytest.approx(numbers(wanted.layers[0]), rel=1e-5)
        assert found.across.step == step
