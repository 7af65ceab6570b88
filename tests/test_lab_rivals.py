"""Optimizers that need more than ``step()``: pairs of two, and those that train and evaluate different weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aida_lab.experiments import find_experiment
from aida_lab.external import RIVALS, source_of
from aida_lab.models.gpt import GPT
from aida_lab.parsing import UsageError
from aida_lab.report.naming import title
from aida_lab.request import RunRequest
from aida_lab.schedules import Constant, Cosine, InverseSquareRoot, StepDecay, Undecayed
from aida_lab.spec import RunSpec
from aida_lab.tasks.classification import Classification
from aida_lab.training.loop import Training
from aida_lab.training.optimizers import MatricesAndRest, build
from aida_lab.tuning import method_of
from averaging import Averaging
from stopped_runs import CPU, run_in_two_pieces

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

AVERAGING = "averaging:Averaging"
MUON = pytest.param(
    "torch.optim:Muon+aida",
    marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9"),
)


def request(optimizer: str, experiment: str = "digits", **changes: Any) -> RunRequest:
    return RunRequest(find_experiment(experiment), (optimizer,), **changes)


def spec(optimizer: str, experiment: str = "digits", **changes: Any) -> RunSpec:
    return request(optimizer, experiment, **changes).specs()[0]


def parts(optimizer: str, module: nn.Module, **changes: Any) -> tuple[torch.optim.Optimizer, ...]:
    built = build(spec(optimizer, **changes), module, torch.device("cpu"))
    assert isinstance(built, MatricesAndRest)
    return built.parts


# -- two weights -------------------------------------------------------------------------------------------


def test_an_optimizer_with_modes_is_evaluated_in_one_and_trained_and_saved_in_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(spec(AVERAGING, epochs=2), CPU)
    (optimizer,) = training.optimizers.values()
    assert isinstance(optimizer, Averaging)
    seen, evaluate = [], Classification.evaluate

    def watched(task: Classification, final: bool) -> Mapping[str, float]:
        seen.append(optimizer.mode)
        return evaluate(task, final)

    monkeypatch.setattr(Classification, "evaluate", watched)
    for _ in range(2):
        training.train_epoch(lambda: seen.append(optimizer.mode))
        assert training.state()["optimizers"]["model"]["param_groups"][0]["mode"] == "train"
    assert seen == [*["train"] * 24, "eval"] * 2


@pytest.mark.parametrize("optimizer", [AVERAGING, f"{AVERAGING}+aida-k1", f"adamw+{AVERAGING}", MUON])
def test_a_stopped_run_of_such_an_optimizer_ends_as_it_would_have(optimizer: str, tmp_path: Path) -> None:
    whole, resumed = run_in_two_pieces(spec(optimizer, epochs=4), tmp_path)
    assert whole["best"] > 20, "ten classes: guessing gives 10"
    assert resumed == whole


def test_an_optimizer_with_modes_keeps_its_learning_rate_after_the_warm_up() -> None:
    cosine, root = Cosine(warmup=100, per_epoch=100), InverseSquareRoot(d_model=256, warmup=100, scale=2.0)
    for schedule in (Constant(), StepDecay((1, 2), of=4), cosine, root):
        factors = [Undecayed(schedule).factor(step // 100, step, 4) for step in range(400)]
        assert factors[:100] == [schedule.factor(0, step, 4) for step in range(100)]
        assert set(factors[100:]) == {max(factors)}
    training = Training(spec(AVERAGING, epochs=4), CPU)  # the digits' schedule decays after two
    rates = [training.train_epoch()["lr"] for _ in range(4)]
    assert rates == [0.1] * 4


# -- pairs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["aida+adamw", f"torch.optim:NAdam+{AVERAGING}", MUON])
def test_the_first_of_a_pair_gets_the_hidden_matrices_and_the_second_all_else(optimizer: str) -> None:
    model = GPT(16, context=8, width=8, layers=2, heads=2)
    names = {p: name for name, p in model.named_parameters()}
    first, rest = (
        {names[p] for group in part.param_groups for p in group["params"]} for part in parts(optimizer, model)
    )
    hidden = {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("qkv", "out", "up", "down")}
    assert first == hidden
    assert rest == set(names.values()) - hidden


def test_each_of_a_pair_has_its_own_values_and_both_the_first_ones_lr() -> None:
    given = {"eps": 1e-12, "rest_eps": 1e-5}
    model = GPT(16, context=8, width=8, layers=1, heads=2)
    pair = parts("aida+adamw", model, experiment="gpt-pysource", variant="tiny", given=given)
    first, rest = (part.param_groups for part in pair)
    assert {group["eps"] for group in first} == {1e-12}
    assert {group["eps"] for group in rest} == {1e-5}
    assert {group["lr"] for group in (*first, *rest)} == {3e-4}
    assert [group["weight_decay"] for group in first] == [0.1]
    assert [group["weight_decay"] for group in rest] == [0.1, 0.0], "norms do not decay"


def test_the_second_of_a_pair_takes_no_lr_of_its_own() -> None:
    with pytest.raises(UsageError, match="the same learning rate; leave rest_lr out"):
        spec("aida+adamw", given={"rest_lr": 1e-3})
    with pytest.raises(UsageError, match="adamw has no hyper-parameter 'projections'"):
        spec("aida+adamw", given={"rest_projections": 1})


def test_a_pair_needs_parameters_for_both() -> None:
    with pytest.raises(ValueError, match="no hidden matrices"):
        parts("aida+adamw", nn.Sequential(nn.Linear(2, 2)))


def test_a_pair_is_tuned_around_the_lr_of_its_first() -> None:
    method = method_of("torch.optim:NAdam+aida:rest_eps=1e-12", request("aida"), (), (1,))
    assert method.given == (2e-3,)
    assert method.base.hyper["rest_eps"] == 1e-12


def test_a_pair_is_named_and_identified_by_both() -> None:
    assert title("torch.optim:NAdam+aida") == "NAdam (torch.optim) + Aida"
    version = f"torch {torch.__version__.partition('+')[0]}"
    assert source_of("torch.optim:NAdam+aida") == version
    assert source_of("torch.optim:NAdam+torch.optim:RAdam") == f"{version} + {version}"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_muon_alone_means_muon_and_adamw_with_steps_of_one_size() -> None:
    alone, named = (spec(name, given={"lr": 2e-3}) for name in ("torch.optim:Muon", RIVALS[0].name))
    assert alone == named
    assert alone.hyper["adjust_lr_fn"] == "match_rms_adamw"
