"""How the probe behaves: when it fires, what it hands over, what it refuses, and what it shows on digits."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from aida import Aida
from aida.catalog import catalog, find
from aida.stepsizes import AcrossLayers, LayerStepsizes, StepsizeProbe, explain, summarise
from aida.stepsizes import _histogram as histogram
from aida.stepsizes import _pieces as tensor_pieces
from aida.stepsizes.sinks import read_jsonl

EXAMPLE = Path(__file__).parents[1] / "examples" / "stepsize_figure.py"


def parameter() -> nn.Parameter:
    p = nn.Parameter(torch.ones(4, 3))
    p.grad = torch.arange(12.0).reshape(4, 3)
    return p


# -- when it fires -----------------------------------------------------------------------------------


def test_fires_on_multiples_of_every_and_closes_each_measurement_with_a_summary():
    p, records = parameter(), []
    optimizer = Aida([p])
    StepsizeProbe(optimizer, [("p", p)], every=3, sink=records.append)
    for _ in range(7):
        optimizer.step()
    assert [(type(record), record.step) for record in records] == [
        (LayerStepsizes, 3), (AcrossLayers, 3), (LayerStepsizes, 6), (AcrossLayers, 6),
    ]  # fmt: skip


def test_goes_on_counting_from_a_checkpoint_and_stops_when_closed():
    p, records = parameter(), []
    optimizer = Aida([p])
    with StepsizeProbe(optimizer, [("p", p)], every=10, sink=records.append, start=19):
        optimizer.step()
    assert [record.step for record in records] == [20, 20]
    for _ in range(10):
        optimizer.step()
    assert len(records) == 2


def test_measure_by_hand_names_the_step():
    p = parameter()
    optimizer = Aida([p])
    probe = StepsizeProbe(optimizer, [("p", p)])
    assert probe.measure() is None  # no state yet
    optimizer.step()
    assert probe.measure(step=77).across.step == 77


def test_measure_reads_steps_that_no_hook_saw():
    # as between two replays of a CUDA graph: the state moved, the hooks did not run
    p = parameter()
    optimizer = Aida([p])
    probe = StepsizeProbe(optimizer, [("p", p)], every=1)
    optimizer.step()
    seen = probe.last.layers[0].mean
    optimizer.state[p]["exp_avg_var"].mul_(4)
    assert probe.measure().layers[0].mean == pytest.approx(seen / 2)


def test_counters_on_a_device_are_foretold_and_a_wrong_guess_is_mended(monkeypatch):
    # as on a GPU, where Aida counts steps on the device and skips those with NaN
    monkeypatch.setattr(tensor_pieces, "HOSTS", ())
    copies = []
    fetch = tensor_pieces.HostCopy.fetch
    monkeypatch.setattr(tensor_pieces.HostCopy, "fetch", lambda copy: (copies.append(copy), fetch(copy))[1])
    p, q = parameter(), parameter()
    optimizer = Aida([p, q])
    probe = StepsizeProbe(optimizer, [("p", p), ("q", q)], every=2)
    needed = []
    for step in range(1, 11):
        p.grad = torch.full((4, 3), math.nan) if step == 5 else torch.randn(4, 3)
        optimizer.step()
        if step % 2 == 0:
            needed.append(len(copies))
            copies.clear()
            for record, tensor, counted in zip(probe.last.layers, (p, q), (step - (step >= 5), step), strict=True):
                wanted = (optimizer.state[tensor]["exp_avg_var"] / (1 - 0.999**counted)).rsqrt()
                assert record.mean == pytest.approx(float(wanted.mean()), rel=1e-5)
    assert needed == [1, 1, 2, 1, 1]


def test_a_compiled_step_is_left_alone():
    p = parameter()
    optimizer = Aida([p])
    probe = StepsizeProbe(optimizer, [("p", p)], every=1)
    torch.compile(optimizer.step, backend="eager")()
    assert optimizer.state[p]["step"] == 1
    assert probe.measure(1) is not None


# -- across layers -----------------------------------------------------------------------------------


def layer(**values) -> LayerStepsizes:
    known = {
        "step": 1, "layer": "a", "method": "m", "group": 0, "shape": (2,), "elements": 2, "mean": 1.0, "std": 0.0,
        "min": 1.0, "max": 1.0, "quantiles": (), "bound": 2.0, "at_bound": 0.0, "cosine": None, "scale_m": None,
        "scale_g": None, "hyper": {},
    }  # fmt: skip
    return LayerStepsizes(**{**known, **values})


def test_spread_is_largest_over_smallest_mean_and_shares_weigh_by_elements():
    across = summarise([layer(mean=2.0, at_bound=1.0, elements=1), layer(mean=6.0, elements=3), layer(mean=3.0)])
    assert across.spread == 3
    assert across.at_bound == pytest.approx(1 / 6)
    assert (across.layers, across.elements) == (3, 6)


def test_without_bounds_there_is_no_share_and_a_zero_mean_spreads_without_end():
    across = summarise([layer(mean=0.0, bound=None, at_bound=None), layer(bound=None, at_bound=None)])
    assert across.at_bound is None
    assert across.spread == math.inf


# -- quantiles ---------------------------------------------------------------------------------------

DISTRIBUTIONS = {
    "log-uniform": lambda rng: 10 ** rng.uniform(-15, 15, 20_000),
    "narrow": lambda rng: 300 * (1 + 1e-4 * rng.normal(size=5_000)),
    "two lumps": lambda rng: np.where(rng.random(9_999) < 0.3, 0.1, 316.2),
    "one value": lambda rng: np.full(100, 7.0),
    "a single element": lambda rng: np.array([3.5]),
    "with zeros": lambda rng: np.where(rng.random(1000) < 0.4, 0.0, rng.random(1000)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_quantiles_are_within_the_documented_error_of_the_order_statistic(name):
    values = DISTRIBUTIONS[name](np.random.default_rng(0)).astype(np.float32)
    ordered = np.sort(values).astype(np.float64)
    ranks = sorted({math.floor(level * (len(values) - 1)) for level in np.linspace(0, 1, 41)})
    wanted = torch.tensor([ranks])
    places = histogram.locate(histogram.count(torch.from_numpy(values), [len(values)]), wanted)
    smallest, largest = torch.tensor([ordered[0]]), torch.tensor([ordered[-1]])
    (quantiles,) = histogram.values_at(wanted, places, smallest, largest).tolist()
    for rank, found in zip(ranks, quantiles, strict=True):
        assert abs(found - ordered[rank]) <= histogram.RELATIVE_ERROR * ordered[rank] + 1e-19, (rank, found)


def test_histogram_counts_every_value_once_and_edges_belong_to_the_bin_above():
    bins = (divmod(i, histogram.PER_POWER) for i in range(histogram.BINS))
    lower = [math.ldexp(1 + part / histogram.PER_POWER, histogram.FIRST + power) for power, part in bins]
    edges = torch.tensor(lower, dtype=torch.float32)
    (counts,) = histogram.count(edges, [len(edges)])
    assert torch.equal(counts, torch.ones(histogram.BINS, dtype=torch.int64))
    outside = torch.tensor([0.0, 1e-30, 1e30, math.inf, math.nan])
    (counts,) = histogram.count(outside, [len(outside)])
    assert (int(counts[0]), int(counts[-1]), int(counts.sum())) == (2, 3, 5)


# -- errors ------------------------------------------------------------------------------------------


def test_refusals_name_the_value_the_rule_and_the_way_out():
    p = parameter()
    optimizer = Aida([p])
    with pytest.raises(ValueError, match="every=0 must be an integer >= 1"):
        StepsizeProbe(optimizer, [("p", p)], every=0)
    with pytest.raises(ValueError, match=r"quantiles=\(0.5, 50\) must lie between 0 and 1"):
        StepsizeProbe(optimizer, [("p", p)], quantiles=(0.5, 50))
    with pytest.raises(TypeError, match=r"pass model.named_parameters\(\)"):
        StepsizeProbe(optimizer, [p])
    with pytest.raises(ValueError, match="a generator works only once"):
        StepsizeProbe(optimizer, [])


# -- explain -----------------------------------------------------------------------------------------


def test_explain_says_bound_eps_path_and_decay_of_every_group(capsys):
    p, q = parameter(), parameter()
    groups = [{"params": [p]}, {"params": [q], "eps": 1e-6, "weight_decay": 0.1, "foreach": False, "fused": False}]
    text = explain(Aida(groups))
    assert not capsys.readouterr().out
    first, second = text.split("Aida, group 1")
    assert "316.2" in first
    assert "inside: added to the stored variance" in first
    assert "weight decay  none" in first
    assert "reference" not in first
    assert "31.62" in second
    assert "decoupled: every step shrinks the weights by lr * 0.1" in second
    assert "reference on cpu in float32 (1 tensor)" in second


@pytest.mark.parametrize("name", ["aida", "adabelief", "adam-plus"])
def test_explain_says_which_sgd_small_gradients_get(name):
    p, q = (torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(2))
    adaptive = find(name).build([p], lr=0.002, betas=(0.8, 0.999), eps=1e-8)
    said = re.search(r"SGD with momentum ([\d.]+) and lr ([\d.]+)", explain(adaptive))
    sgd = torch.optim.SGD([q], momentum=float(said[1]), lr=float(said[2]))
    for _ in range(100):  # the bias correction of m is over then: 0.8**100 is 2e-10
        before = p.detach().clone(), q.detach().clone()
        p.grad = q.grad = torch.randn(5, dtype=torch.float64) * 1e-6  # its square is 1e-7 of eps / (1 - beta2)
        adaptive.step()
        sgd.step()
    assert torch.allclose(p - before[0], q - before[1], rtol=2e-4)  # of lr four digits are said


def test_explain_names_the_path_of_every_flag():
    paths = {
        "reference on cpu": {"foreach": False, "fused": False},
        "foreach on cpu": {"foreach": True},
        "foreach on cpu in float32 (2 tensors)": {"fused": False},
    }
    for label, flags in paths.items():
        assert label in explain(Aida([parameter(), parameter()], **flags))


@pytest.mark.parametrize("name", list(catalog()))
def test_explain_knows_every_optimizer_of_the_catalog(name, capsys):
    entry = find(name)
    text = explain(entry.build([parameter()]))
    assert capsys.readouterr().out == ""
    for word in (entry.title, entry.reading.eps, entry.reading.about, "path", "weight decay"):
        assert word in text


def test_explain_knows_torchs_own():
    assert "foreach (asked for)" in explain(torch.optim.NAdam([parameter()], foreach=True))
    assert "one tensor at a time (asked for)" in explain(torch.optim.RAdam([parameter()], foreach=False))
    assert "fused (asked for)" in explain(torch.optim.Adam([parameter()], fused=True))
    assert "1e+08" in explain(torch.optim.AdamW([parameter()]))


# -- what the paper claims ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_on_digits_aida_spreads_less_than_adabelief_and_that_less_than_adabelief_star(seed, tmp_path):
    spec = importlib.util.spec_from_file_location("stepsize_figure", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    spreads = []
    for method in ("aida", "adabelief", "adabelief-star"):
        path = tmp_path / method
        example.train(method, path, steps=500, every=100, seed=seed, width=8)
        # in the first 200 steps the network is only just starting to learn
        spreads.append([record.spread for record in read_jsonl(path).across if record.step >= 300])
    for aida, adabelief, star in zip(*spreads, strict=True):
        assert aida < adabelief < star


def test_layers_inside_a_tensor_are_measured_as_separate_tensors_are() -> None:
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 6, 4, generator=generator)
    experts = nn.Parameter(stack.clone())
    alone = [nn.Parameter(one.clone()) for one in stack]
    optimizers = Aida([experts], layer_dims=1), Aida(alone)
    named = [("experts", experts)], [(f"experts[{i}]", p) for i, p in enumerate(alone)]
    probes = [StepsizeProbe(each, names, every=1) for each, names in zip(optimizers, named, strict=True)]
    for _ in range(3):
        experts.grad = torch.randn(stack.shape, generator=generator)
        for p, grad in zip(alone, experts.grad, strict=True):
            p.grad = grad.clone()
        for each in optimizers:
            each.step()

    one, other = (probe.last.layers for probe in probes)
    assert [replace(record, hyper={}) for record in one] == [replace(record, hyper={}) for record in other]
    assert "layers        3, each with its own projections (layer_dims 1)" in explain(optimizers[0])
