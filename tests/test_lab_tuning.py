"""The values of every optimizer in every experiment: fixed by the paper's appendix, or searched."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from aida.catalog import catalog, find
from aida_lab.experiments import experiments, find_experiment
from catalog_cases import NAMES


@pytest.mark.parametrize("experiment", experiments().values(), ids=lambda each: each.name)
def test_fixed_and_searched_values_build_and_do_not_overlap(experiment: Any) -> None:
    for method, tuning in experiment.tuning.items():
        entry = find("aida" if method.startswith("aida-k") else method)
        assert not set(tuning.fixed) & set(tuning.searched)
        for end in (0, -1):
            values = {**tuning.fixed, **{name: values[end] for name, values in tuning.searched.items()}}
            group = entry.build([Parameter(torch.ones(1))], **values).param_groups[0]
            assert {name: group[name] for name in values} == values


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_can_train_on_digits(name: str) -> None:
    assert name in find_experiment("digits").tuning


@pytest.mark.parametrize("experiment", experiments().values(), ids=lambda each: each.name)
def test_every_method_of_a_table_has_values(experiment: Any) -> None:
    assert {"aida" if method.startswith("aida-k") else method for method in experiment.paper} <= set(experiment.tuning)


@pytest.mark.parametrize(
    ("name", "experiment", "fixed", "searched"),
    [
        ("aida", "resnet34-cifar100", {"lr": 1e-3, "eps": 1e-9, "weight_decay": 5e-4}, {}),
        ("aida", "lstm3-ptb", {"lr": 1e-3, "eps": 1e-16, "weight_decay": 1.2e-6}, {}),
        ("sgd", "lstm2-ptb", {"momentum": 0.9}, {"lr": (30.0, 3.0, 1.0, 0.1)}),
        ("adam", "vgg11-cifar10", {"betas": (0.9, 0.999)}, {"eps": (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)}),
        ("adamw", "transformer-multi30k", {}, {"eps": (1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12)}),
        ("adamw", "transformer-multi30k", {"weight_decay": 5e-4, "betas": (0.9, 0.98)}, {}),
        ("adabound", "wgan-gp-cifar10", {"lr": 2e-4}, {}),
        ("adamw", "vgg11-cifar100", {"weight_decay": 0.01}, {}),
        ("adabound", "wgan-gp-cifar10", {}, {"eps": (1e-2, 1e-4, 1e-6, 1e-8, 1e-10), "final_lr": (0.1, 0.01)}),
        ("yogi", "vgg11-cifar10", {}, {"eps": (0.1, 0.01, 0.001)}),
        ("msvag", "vgg11-cifar10", {"lr": 0.1, "mixed_bias_correction": True}, {}),
        ("fromage", "transformer-multi30k", {}, {"lr": (0.1, 0.01, 0.001, 0.0001)}),
        ("adabelief", "resnet18-imagenet", {"weight_decay": 1e-2, "decoupled_weight_decay": True}, {}),
        ("adabelief", "transformer-multi30k", {}, {"eps": (1e-8, 1e-10, 1e-12, 1e-14, 1e-16)}),
    ],
)  # fmt: skip
def test_values_are_those_of_the_appendix(
    name: str, experiment: str, fixed: dict[str, Any], searched: dict[str, Any]
) -> None:
    tuning = find_experiment(experiment).tuning[name]
    assert {key: tuning.fixed[key] for key in fixed} == fixed
    assert {key: tuning.searched[key] for key in searched} == searched


def test_values_of_a_method_come_before_those_of_its_optimizer() -> None:
    experiment = find_experiment("vgg11-cifar10")
    assert experiment.tuning_of("aida", {"projections": 1}) is experiment.tuning["aida-k1"]
    assert experiment.tuning_of("aida", {"projections": 3}) is experiment.tuning_of("aida") is experiment.tuning["aida"]


def test_an_optimizer_without_values_trains_with_its_defaults() -> None:
    experiment = find_experiment("resnet18-imagenet")
    assert experiment.tuning_of("yogi") is None
    assert experiment.tuned("yogi") == dict(catalog()["yogi"].defaults)
    assert not experiment.searched("yogi")
    assert not experiment.not_in_paper("yogi", {"lr": 7.0})


def test_values_cannot_be_changed() -> None:
    tuning = find_experiment("vgg11-cifar10").tuning
    with pytest.raises(TypeError):
        tuning["adam"] = tuning["adamw"]  # type: ignore[index]
    with pytest.raises(TypeError):
        tuning["adam"].fixed["lr"] = 1.0  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        tuning["adam"].fixed = {}  # type: ignore[misc]
