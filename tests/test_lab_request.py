"""From the words of a command to runs: settings, seeds, optimizers from outside, labels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aida_lab.experiments import find_experiment
from aida_lab.parsing import UsageError, as_assignments, parse_seeds, parse_values
from aida_lab.progress.labels import differing, labels
from aida_lab.request import RunRequest

DIGITS = find_experiment("digits")


def requested(**words) -> RunRequest:
    return RunRequest(DIGITS, **words)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-9", 1e-9),
        ("3", 3),
        ("-0.5", -0.5),
        ("true", True),
        ("False", False),
        ("none", None),
        ("0.9,0.99", (0.9, 0.99)),
        ("(0.9, 0.99)", (0.9, 0.99)),
        ("skip", "skip"),
        ("'a b'", "a b"),
    ],
)
def test_a_setting_is_a_python_literal_or_a_bare_word(text, value):
    found = parse_values([f"name={text}"])["name"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["eps", "=1", "a b=1", "lr=1e-9x", "lr=O.1", "lr=", "lr=__import__('os').getcwd()"])
def test_what_is_no_setting_is_refused_with_the_word(text):
    with pytest.raises(UsageError) as found:
        parse_values([text])
    assert text.partition("=")[2] in str(found.value)
    assert "--set" in str(found.value)


def test_one_setting_twice_is_refused():
    with pytest.raises(UsageError, match=r"--set eps is given twice, as 1e-09 and '1e-8'"):
        parse_values(["eps=1e-9", "eps=1e-8"])


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0", (0,)), ("0,1,2", (0, 1, 2)), ("0-4", (0, 1, 2, 3, 4)), ("7, 0-1,1", (7, 0, 1)), ("3-3", (3,))],
)
def test_seeds_are_lists_and_ranges(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "4-0", "-1", "0,,1", "1.5"])
def test_what_is_no_seed_is_refused(text):
    with pytest.raises(UsageError, match="write them as 0,1,2 or 0-4"):
        parse_seeds(text)


def test_one_run_for_each_optimizer_and_seed():
    specs = requested(optimizers=("aida", "adam"), seeds=(0, 1)).specs()
    assert [(spec.optimizer, spec.seed) for spec in specs] == [("aida", 0), ("aida", 1), ("adam", 0), ("adam", 1)]
    assert len({spec.key for spec in specs}) == 4


def test_two_words_for_one_run_make_one_run():
    assert len(requested(optimizers=("aida", "aida-k2", "Aida")).specs()) == 1


def test_methods_name_aidas_projections():
    specs = requested(optimizers=("aida-k1", "aida-k2")).specs()
    assert [spec.hyper["projections"] for spec in specs] == [1, 2]
    assert [spec.method for spec in specs] == ["aida-k1", "aida-k2"]
    with pytest.raises(UsageError, match="contradict"):
        requested(optimizers=("aida-k1",), given={"projections": 2}).specs()


def test_given_values_replace_tuned_ones():
    tuned, given = (requested(given=given).specs()[0] for given in ({}, {"eps": 1e-12}))
    assert given.hyper["eps"] == 1e-12
    assert {**given.hyper, "eps": tuned.hyper["eps"]} == tuned.hyper


def test_one_and_one_point_zero_are_one_run():
    whole, broken = (requested(optimizers=("adam",), given=given).specs()[0] for given in ({"lr": 1}, {"lr": 1.0}))
    assert whole.key == broken.key
    whole, broken = (requested(given={"betas": betas}).specs()[0] for betas in ((0, 0.99), (0.0, 0.99)))
    assert whole.key == broken.key


@pytest.mark.parametrize("optimizer", ["aida", "torch.optim:AdamW"])
def test_an_unknown_hyper_parameter_gets_the_near_miss(optimizer):
    with pytest.raises(UsageError) as found:
        requested(optimizers=(optimizer,), given={"weigth_decay": 0.1}).specs()
    assert f"{optimizer} has no hyper-parameter 'weigth_decay'; did you mean 'weight_decay'?" in str(found.value)
    assert "betas" in str(found.value)


@pytest.mark.parametrize("optimizer", ["aida", "adam", "torch.optim:Adam"])
def test_a_value_no_optimizer_could_use_is_refused_before_anything_starts(optimizer):
    with pytest.raises(UsageError, match=rf"{optimizer} cannot be built with lr=-1\.0"):
        requested(optimizers=(optimizer,), given={"lr": -1}).specs()


def test_optimizers_from_outside_keep_their_name_and_what_was_given():
    (spec,) = requested(optimizers=("torch.optim:NAdam",), given={"lr": 0.01}).specs()
    assert spec.method == "torch.optim:NAdam"
    assert dict(spec.hyper) == {"lr": 0.01}


@pytest.mark.parametrize("name", ["torch.optim:Nothing", "no_such_module:Class", "torch.optim:lr_scheduler", "adan"])
def test_unknown_optimizers_are_refused(name):
    with pytest.raises(LookupError, match=name.split(":")[0]):
        requested(optimizers=(name,)).specs()


def test_what_is_not_said_the_experiment_and_the_device_decide():
    (cpu,), (gpu,) = requested().specs(), requested(device="cuda:0").specs()
    assert (cpu.epochs, cpu.batch, cpu.variant) == (DIGITS.epochs, DIGITS.batch, DIGITS.variants[0])
    assert (cpu.precision, gpu.precision) == ("fp32", "bf16")
    compiled = RunRequest(replace(DIGITS, compiled=True), device="cuda").specs()[0]
    assert compiled.compiled
    assert not RunRequest(replace(DIGITS, compiled=True), device="cpu").specs()[0].compiled
    assert requested(compiled=True).specs()[0].compiled
    assert requested(probe_every=None).specs()[0].probe_every == DIGITS.probe_every
    assert requested(probe_every=None, limit=3).specs()[0].probe_every == 3  # else a short trial would measure nothing
    assert requested(probe_every=None, limit=10_000).specs()[0].probe_every == DIGITS.probe_every
    assert requested(probe_every=7, limit=3).specs()[0].probe_every == 7
    assert cpu.probe_every == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [({"precision": "fp8"}, "not one of fp32, tf32, bf16"), ({"variant": "odd"}, "no variant 'odd'; it has ")],
)
def test_unknown_choices_get_the_known_ones(words, line):
    with pytest.raises(UsageError, match=line):
        requested(**words).specs()


def test_values_are_typed_as_they_are_read():
    values = {"lr": 0.012345678901, "betas": (0.9, 0.99), "projections": 1, "amsgrad": True, "clip": None, "to": "skip"}
    typed = as_assignments(values)
    assert parse_values(typed) == values
    assert not any(" " in text for text in typed)


def test_labels_name_what_differs():
    specs = [
        *requested(optimizers=("aida-k1", "adam"), seeds=(0, 1)).specs(),
        *requested(optimizers=("adam",), given={"eps": 1e-4}).specs(),
    ]
    assert list(labels(specs).values()) == [
        "aida-k1 seed 0",
        "aida-k1 seed 1",
        "adam seed 0",
        "adam seed 1",
        "adam eps=0.0001 seed 0",
    ]
    longer = replace(specs[0], epochs=99)
    assert labels([specs[0], longer])[longer.key] == "aida-k1 epochs=99 seed 0"
    warmed = replace(specs[0], warmup=9)
    assert labels([specs[0], warmed])[warmed.key] == "aida-k1 warmup=9 seed 0"


def test_what_differs_is_what_is_not_as_tuned():
    (spec,) = requested(optimizers=("aida",), given={"betas": (0.5, 0.9), "lr": 1e-3}).specs()
    assert differing(spec) == {"betas": [0.5, 0.9]}
    (spec,) = requested(optimizers=("torch.optim:Adam",), given={"lr": 1e-3}).specs()
    assert differing(spec) == {"lr": 1e-3}
