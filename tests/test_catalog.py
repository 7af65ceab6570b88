"""The catalog's entries: names, values, and stepsizes that are what really moved the weights."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from aida import Aida
from aida.baselines.adabelief import AdaBeliefStar
from aida.catalog import catalog, find, reading_for
from aida.readings import Reading
from catalog_cases import NAMES

#: Optimizers whose stepsizes can be read, as they are built for a probe.
READABLE: dict[str, Any] = {
    **{name: lambda params, name=name, **v: find(name).build(params, **v) for name in NAMES},
    "torch-radam": torch.optim.RAdam,
    "torch-nadam": torch.optim.NAdam,
    "torch-adam-amsgrad": lambda params, **v: torch.optim.Adam(params, amsgrad=True, **v),
}
WITHOUT = ("sgd", "fromage")
over_readable = pytest.mark.parametrize("name", [name for name in READABLE if name not in WITHOUT])


def test_the_catalog_holds_the_comparison() -> None:
    assert set(NAMES) == {
        "aida", "sgd", "adam", "adamw", "radam", "adabound", "yogi", "msvag", "fromage", "adabelief",
        "adabelief-star", "adam-plus",
    }  # fmt: skip
    assert NAMES[0] == "aida"
    years = [entry.paper.year for entry in catalog().values()][1:]
    assert years == sorted(years)


def test_importing_the_package_imports_no_rival() -> None:
    code = "import sys, aida, aida.catalog; print([m for m in sys.modules if m.startswith('aida.baselines')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("asked", "found"),
    [("adam", "adam"), (" AdamW ", "adamw"), ("AdaBelief*", "adabelief-star"), ("adam_plus", "adam-plus")],
)
def test_find_takes_names_and_titles(asked: str, found: str) -> None:
    assert find(asked).name == found


def test_find_lists_the_known_names_and_suggests_a_close_one() -> None:
    with pytest.raises(LookupError, match=r"no optimizer is called 'adabelif'; did you mean 'adabelief'\? known are "):
        find("adabelif")
    with pytest.raises(LookupError) as error:
        find("lion")
    assert all(name in str(error.value) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_the_class(name: str) -> None:
    entry = find(name)
    own = {} if name != "sgd" else {"lr": 0.1, "momentum": 0.9}  # SGD here means SGD with momentum
    bare = entry.optimizer([Parameter(torch.ones(1))], **own).param_groups[0]  # type: ignore[call-arg]
    assert {key: bare[key] for key in entry.defaults} == dict(entry.defaults)


def test_entries_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        catalog()["mine"] = find("adam")  # type: ignore[index]
    with pytest.raises(TypeError):
        find("adam").defaults["lr"] = 1.0  # type: ignore[index]


# -- readings --------------------------------------------------------------------------------------


def run(name: str, steps: int, **values: Any) -> tuple[Parameter, Optimizer, torch.Tensor]:
    """Steps on noisy gradients of many scales; returns the weights before the last one too."""
    rng = torch.Generator().manual_seed(0)
    p = Parameter(torch.randn(600, generator=rng, dtype=torch.float64))
    optimizer = READABLE[name]([p], **values)
    scales = torch.logspace(-9, 1, 600, dtype=torch.float64)
    before = p.detach().clone()
    for _ in range(steps):
        before = p.detach().clone()
        p.grad = scales * (torch.randn(600, generator=rng, dtype=torch.float64) + 0.5)
        optimizer.step()
    return p, optimizer, before


def stepsizes(optimizer: Optimizer, p: Parameter) -> torch.Tensor:
    reading, group, state = reading_for(optimizer), optimizer.param_groups[0], optimizer.state[p]
    assert reading.stepsize is not None
    return reading.stepsize([state[key] for key in reading.keys(group)], state["step"], group)


@over_readable
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_the_stepsize_read_is_the_one_that_moved_the_weights(name: str, steps: int) -> None:
    p, optimizer, before = run(name, steps, lr=1e-3, **({"weight_decay": 0.0} if name == "adamw" else {}))
    group, state = optimizer.param_groups[0], optimizer.state[p]
    beta1 = group["betas"][0]
    momentum = state["exp_avg"] / (1 - beta1**steps)
    if name == "torch-nadam":  # its momentum looks one step ahead
        mu, ahead = (beta1 * (1 - 0.5 * 0.96 ** (t * group["momentum_decay"])) for t in (steps, steps + 1))
        product = state["mu_product"].double()
        momentum = (1 - mu) / (1 - product) * p.grad + ahead / (1 - product * ahead) * state["exp_avg"]
    moved = before - p.detach()
    tolerance = 1e-6 if name == "torch-nadam" else 1e-9  # torch keeps mu_product in float32
    torch.testing.assert_close(1e-3 * momentum * stepsizes(optimizer, p), moved, rtol=tolerance, atol=1e-15)


@over_readable
@pytest.mark.parametrize("steps", [1, 3, 50])
def test_no_stepsize_exceeds_its_bound(name: str, steps: int) -> None:
    p, optimizer, _ = run(name, steps)
    bound = reading_for(optimizer).bound(optimizer.param_groups[0])
    assert bound is not None
    assert float(stepsizes(optimizer, p).max()) <= bound * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aida", 316.2),
        ("adabelief", 316.2),
        ("adam-plus", 316.2),
        ("adabelief-star", 1e8),
        ("adam", 1e8),
        ("adamw", 1e8),
        ("torch-nadam", 1e8),
    ],
)
def test_a_weight_without_gradient_sits_at_the_bound(name: str, expected: float) -> None:
    p = Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = READABLE[name]([p])
    for _ in range(20):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    bound = reading_for(optimizer).bound(optimizer.param_groups[0])
    assert bound == pytest.approx(expected, rel=1e-3)
    assert stepsizes(optimizer, p).tolist() == pytest.approx([bound] * 3, rel=1e-6)


@over_readable
def test_stepsizes_are_read_chunk_by_chunk_and_change_nothing(name: str) -> None:
    p, optimizer, _ = run(name, 5)
    reading, group, state = reading_for(optimizer), optimizer.param_groups[0], optimizer.state[p]
    keys = reading.keys(group)
    kept = {key: state[key].clone() for key in keys}
    whole = stepsizes(optimizer, p)
    assert reading.stepsize is not None
    parts = [
        reading.stepsize(chunks, state["step"], group)
        for chunks in zip(*(state[key].split(70) for key in keys), strict=True)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert all(torch.equal(state[key], kept[key]) for key in keys)


@pytest.mark.gpu
@over_readable
def test_stepsizes_on_a_gpu_are_those_of_the_cpu(name: str) -> None:
    """Also where the step counter lies on the host, as torch's does."""
    p, optimizer, _ = run(name, 5)
    reading, group, state = reading_for(optimizer), optimizer.param_groups[0], optimizer.state[p]
    chunks = [state[key].float() for key in reading.keys(group)]
    assert reading.stepsize is not None
    expected = reading.stepsize(chunks, state["step"], group)
    for step in (state["step"].cpu(), state["step"].cuda()):
        found = reading.stepsize([chunk.cuda() for chunk in chunks], step, group)
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("name", WITHOUT)
def test_optimizers_without_adaptive_stepsize_say_why(name: str) -> None:
    optimizer = find(name).build([Parameter(torch.ones(1))])
    reading = reading_for(optimizer)
    assert reading.stepsize is None
    assert reading.keys(optimizer.param_groups[0]) == ()
    assert reading.about.startswith("none")


def test_amsgrad_reads_the_maximum_it_divides_by() -> None:
    optimizer = torch.optim.Adam([Parameter(torch.ones(1))], amsgrad=True)
    assert reading_for(optimizer).keys(optimizer.param_groups[0]) == ("max_exp_avg_sq",)


def test_a_subclass_is_read_as_its_parent_and_a_stranger_refused() -> None:
    class MyAida(Aida):
        pass

    assert reading_for(MyAida([Parameter(torch.ones(1))])) is find("aida").reading
    star = AdaBeliefStar([Parameter(torch.ones(1))])
    assert reading_for(star) is find("adabelief-star").reading
    with pytest.raises(TypeError, match=r"no reading of Rprop's stepsizes is known; known are aida\.AdaBelief, "):
        reading_for(torch.optim.Rprop([Parameter(torch.ones(1))]))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("aida", {}, "none"),
        ("aida", {"weight_decay": 0.1, "decoupled_weight_decay": False}, "L2: 0.1"),
        ("aida", {"weight_decay": 0.1}, "decoupled"),
        ("adamw", {}, "decoupled: every step shrinks the weights by lr * 0.01"),
        ("adam", {"weight_decay": 0.1}, "L2"),
        ("sgd", {"weight_decay": 0.1}, "L2"),
        ("radam", {"weight_decay": 0.1}, "decoupled"),
        ("torch-radam", {"weight_decay": 0.1}, "L2"),
        ("msvag", {"weight_decay": 0.1}, "L2"),
        ("fromage", {}, "none"),
    ],
)
def test_weight_decay_is_explained(name: str, values: dict[str, Any], words: str) -> None:
    optimizer = READABLE[name]([Parameter(torch.ones(1))], **values)
    reading: Reading = reading_for(optimizer)
    assert reading.weight_decay(optimizer.param_groups[0]).startswith(words)
