"""SGD that gives way to ASGD, as in the public language-model script: when, to what, and after a break."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from aida_lab.data import text
from aida_lab.experiments import find_experiment
from aida_lab.request import RunRequest
from aida_lab.schedules import Restarted, StepDecay
from aida_lab.spec import RunSpec, Switch
from aida_lab.training.loop import Switching, Training
from aida_lab.training.options import Options
from lab_cases import one_thread_and_a_seed, words

same_start = pytest.fixture(autouse=True)(one_thread_and_a_seed)


@pytest.fixture(autouse=True)
def random_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of twenty words, in which nothing is to be learned but how often they come."""
    known = tuple(f"word {n}" for n in range(20))
    parts = (words(n, vocabulary=20) for n in (20 * 300, 400, 300))
    found = text.LanguageSplits(*parts, known)
    monkeypatch.setattr(text, "ptb", lambda root=None: found)


def spec_of(optimizer: str = "sgd", variant: str = "faithful-asgd", epochs: int = 40, **given: float) -> RunSpec:
    request = RunRequest(
        find_experiment("lstm1-ptb"), (optimizer,), given, device="cpu", variant=variant, epochs=epochs, limit=1
    )
    return request.specs()[0]


def training_of(spec: RunSpec) -> Training:
    return Training(spec, Options(device="cpu"))


def literal_switch(losses: list[float], nonmono: int) -> int | None:
    """The public rule, epoch by epoch: the losses before this one, then this one."""
    before: list[float] = []
    for epoch, loss in enumerate(losses, 1):
        if len(before) > nonmono and loss > min(before[:-nonmono]):
            return epoch
        before.append(loss)
    return None


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("slope", [0.0, -0.05, -0.5])
def test_it_comes_when_the_public_rule_says_and_once(interval: int, slope: float) -> None:
    draw = random.Random(interval)
    for _ in range(200):
        losses = [slope * n + draw.choice((0.0, 0.5, draw.random())) for n in range(30)]
        switching = Switching(Switch("test_ppl", interval))
        came = [n for n, loss in enumerate(losses, 1) if switching.comes({"test_ppl": loss, "other": -loss}, n)]
        wanted = literal_switch(losses, interval)
        assert came == ([] if wanted is None else [wanted])
        assert switching.at == wanted


def test_an_epoch_without_a_measure_counts_for_nothing() -> None:
    switching = Switching(Switch("test_ppl", 1))
    assert not any(switching.comes({}, epoch) for epoch in range(1, 9))
    assert not switching.seen


@pytest.mark.parametrize(
    ("at", "factors"),
    [
        (7, {8: 1.0, 100: 1.0, 101: 0.1, 145: 0.1, 146: 0.01, 200: 0.01}),
        # the script divides after epochs 100 and 145, a switch in the same epoch comes first
        (100, {101: 0.1, 146: 0.01}),
        (101, {102: 1.0, 145: 1.0, 146: 0.1}),
        (150, {151: 1.0, 200: 1.0}),
    ],
)
def test_the_learning_rate_is_the_first_one_again_and_later_decays_count(at: int, factors: dict[int, float]) -> None:
    schedule = Restarted(find_experiment("lstm1-ptb").schedule, at)
    assert {epoch: schedule.factor(epoch - 1, 0, 200) for epoch in factors} == pytest.approx(factors)
    short = Restarted(StepDecay(at=(100, 145), of=200), 7)
    assert [short.factor(epoch, 0, 20) for epoch in (7, 9, 10, 15)] == pytest.approx([1.0, 1.0, 0.1, 0.01])


@pytest.mark.parametrize(("optimizer", "variant"), [("sgd", "faithful"), ("sgd", "correct"), ("adam", "faithful-asgd")])
def test_nothing_else_switches(optimizer: str, variant: str) -> None:
    training = training_of(spec_of(optimizer, variant))
    assert training.switching is None
    assert "switching" not in training.state()


def switched(lr: float = 30.0) -> Training:
    """A training just after its switch."""
    training = training_of(spec_of(lr=lr))
    while training.epoch < 30:
        assert isinstance(training.optimizers["model"], torch.optim.SGD)
        training.train_epoch()
        assert training.switching is not None
        if training.switching.at is not None:
            assert training.switching.at == training.epoch == literal_switch(training.switching.seen, 5)
            return training
    raise AssertionError("it never came")


def test_a_run_goes_on_with_asgd_without_momentum_at_its_first_learning_rate() -> None:
    training = switched()
    optimizer = training.optimizers["model"]
    assert isinstance(optimizer, torch.optim.ASGD)
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in ("t0", "lambd", "weight_decay")} == {
        "t0": 0.0, "lambd": 0.0, "weight_decay": 1.2e-6,
    }  # fmt: skip
    model = training.task.modules["model"]
    learned = [p for p in model.parameters() if p.requires_grad]
    rates = []
    for _ in range(3):
        before = [p.detach().clone() for p in learned]
        row = training.train_epoch()  # one step
        assert row["lr"] == 30.0
        rates.append(group["lr"])
        lr = rates[max(0, len(rates) - 2)]  # ASGD steps with the learning rate of the step before
        for p, start in zip(learned, before, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.detach(), start - lr * (p.grad + 1.2e-6 * start))
    assert len(set(rates)) == 3, "stretches of different lengths"


def test_what_is_measured_are_the_weights_not_their_average() -> None:
    training = switched()
    for _ in range(3):
        row = training.train_epoch()
    optimizer, model = training.optimizers["model"], training.task.modules["model"]
    assert training.task.evaluate(False)["test_ppl"] == row["test_ppl"]
    averaged = copy.deepcopy(model.state_dict())
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert not torch.equal(optimizer.state[p]["ax"], p)
            averaged[name] = optimizer.state[p]["ax"]
    model.load_state_dict(averaged)
    assert training.task.evaluate(False)["test_ppl"] != row["test_ppl"]


@pytest.mark.parametrize("epochs", [4, 9])
def test_a_broken_run_goes_on_to_the_same_bits(epochs: int) -> None:
    """Broken off before the switch, and after it."""
    spec = spec_of(lr=30.0, epochs=14)
    whole = training_of(spec)
    for _ in range(epochs):
        whole.train_epoch()
    assert whole.switching is not None
    assert (whole.switching.at is None) == (epochs == 4)
    kept = copy.deepcopy(whole.state())
    rows = [whole.train_epoch() for _ in range(14 - epochs)]
    other = training_of(spec)
    other.load(kept)
    again = [other.train_epoch() for _ in range(14 - epochs)]
    times = ("seconds", "eval_seconds")
    assert [{k: v for k, v in row.items() if k not in times} for row in again] == [
        {k: v for k, v in row.items() if k not in times} for row in rows
    ]
    assert isinstance(other.optimizers["model"], torch.optim.ASGD)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_papers_sgd_alone_compares_with_it(layers: int) -> None:
    experiment = find_experiment(f"lstm{layers}-ptb")
    assert experiment.paper_results("faithful") == experiment.paper
    assert dict(experiment.paper_results("faithful-asgd")) == {"sgd": experiment.paper["sgd"]}
    assert not experiment.paper_results("correct")
    assert find_experiment("vgg11-cifar10").paper_results("default") == find_experiment("vgg11-cifar10").paper
