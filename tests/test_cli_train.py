"""``aida train``, ``aida experiments`` and ``aida runs``, with the experiment that needs no download."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from aida_lab.cli import app
from aida_lab.experiments import experiments
from aida_lab.runs.records import read_curve, scan

QUICK = ("--epochs", "2", "--limit", "2", "--device", "cpu")

#: An optimizer of a user's own, in a file where they work.
OWN = """
import torch
class Own(torch.optim.SGD):
    pass
class Broken(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("this optimizer is broken")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in an empty folder, without data, on one of the cores that test workers share."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIDA_DATA", str(tmp_path / "no data"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("own", None)  # of another test's folder
    torch.set_num_threads(1)
    return tmp_path


def call(*words: object):
    return CliRunner(env={"COLUMNS": "220", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


def records():
    return scan("runs")


def test_experiments_are_listed_with_their_data_epochs_and_metric():
    found = call("experiments")
    assert found.exit_code == 0, found.output
    for each in experiments().values():
        assert each.name in found.output
        assert str(each.epochs) in found.output
    assert "digits (in scikit-learn)" in found.output
    assert "cifar10 (missing: aida data get cifar10)" in found.output


@pytest.mark.parametrize("command", ["train", "runs", "experiments"])
def test_help_explains_itself(command):
    found = call(command, "--help")
    assert found.exit_code == 0
    assert "Usage" in found.output


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "which experiment? aida train EXPERIMENT; known are digits, "),
        (("vgg11-cifar",), "no experiment is called 'vgg11-cifar'; did you mean 'vgg11-cifar10'? known are digits, "),
        (("vgg11-cifar10",), "get it with: aida data get cifar10"),
        (("resnet18-imagenet", "--variant", "sample"), "imagenet-sample"),
        (("digits", "--optimizer", "adan"), "no optimizer is called 'adan'"),
        (("digits", "--optimizer", "torch.optim:None"), "cannot be imported"),
        (("digits", "--optimizer", ".own:Class"), "cannot be imported"),
        (("digits", "--optimizer", "builtins:object"), "'builtins:object' is not a subclass of torch.optim.Optimizer"),
        (("digits", "--set", "maximize=b'x'"), "is not a value"),
        (("digits", "--set", "projection=1"), "aida has no hyper-parameter 'projection'; did you mean 'projections'?"),
        (("digits", "--set", "eps=-1"), "aida cannot be built with"),
        (("digits", "--set", "eps"), "--set 'eps' is not NAME=VALUE"),
        (("digits", "--seeds", "a"), "--seeds 'a'"),
        (("digits", "--precision", "fp8"), "--precision 'fp8' is not one of fp32, tf32, bf16"),
        (("digits", "--variant", "odd"), "digits has no variant 'odd'; it has default"),
        (("digits", "--device", "tpu"), "--device 'tpu' is neither cuda nor cpu"),
        (("digits", "--log", "wandb"), "--log 'wandb' is not known; known: tensorboard"),
        (("digits", "--inception", __file__), "digits does not use --inception"),
        (("wgan-gp-cifar10", "--variant", "inception"), "get it with: aida data get inception"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_one_line_and_starts_nothing(words, line):
    found = call("train", *words)
    assert found.exit_code == 2, found.output
    assert line in found.output
    assert len(found.output.strip().splitlines()) == 1
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to be used")
def test_a_gpu_that_is_not_there_is_one_line():
    found = call("train", "digits", "--device", "cuda")
    assert found.exit_code == 2
    assert "sees no CUDA device" in found.output


def test_each_optimizer_and_seed_becomes_a_run_and_is_not_trained_twice():
    words = ("train", "digits", "--optimizer", "aida-k1", "--optimizer", "adam", "--seeds", "0-1", *QUICK)
    found = call(*words)
    assert found.exit_code == 0, found.output
    assert {(each.spec.method, each.spec.seed, each.state) for each in records()} == {
        ("aida-k1", 0, "finished"),
        ("aida-k1", 1, "finished"),
        ("adam", 0, "finished"),
        ("adam", 1, "finished"),
    }
    assert "[4/4] adam seed 1: finished, accuracy" in found.output
    for each in records():
        assert f"runs/{each.path.name}" in found.output
        assert len(read_curve(each.path)) == 2
    changed = [each.changed for each in records()]
    again = call(*words)
    assert again.exit_code == 0
    assert again.output.count("already finished") == 4
    assert [each.changed for each in records()] == changed


def test_runs_at_once_end_as_they_do_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("train", "digits", "--seeds", "0,1", *QUICK)
    alone, at_once = call(*words, "--out", "alone"), call(*words, "--out", "at once", "--jobs", "2")
    assert alone.exit_code == at_once.exit_code == 0, at_once.output
    runs = scan("alone")
    assert len(runs) == len(scan("at once")) == 2
    for run in runs:
        assert (run.path / "result.json").read_bytes() == Path("at once", run.path.name, "result.json").read_bytes()


def test_settings_reach_the_run():
    words = ("--set", "betas=0.8,0.9", "--set", "nonfinite=raise", "--precision", "bf16", "--deterministic")
    assert call("train", "digits", "--warmup", "3", *words, *QUICK).exit_code == 0
    (record,) = records()
    assert record.spec.hyper["betas"] == [0.8, 0.9]
    assert record.spec.hyper["nonfinite"] == "raise"
    assert (record.spec.precision, record.spec.deterministic, record.spec.limit) == ("bf16", True, 2)
    assert record.spec.warmup == 3


@pytest.mark.parametrize(
    ("words", "every"),
    [
        (("digits",), 0),
        (("digits", "--probe"), 2),  # once in each of its epochs, which have two batches
        (("--probe", "digits"), 2),
        (("digits", "--probe", "1"), 1),
        (("digits", "--probe=1"), 1),
    ],
)
def test_probe_stands_alone_or_before_a_number(words, every):
    assert call("train", *words, *QUICK).exit_code == 0
    (record,) = records()
    assert record.spec.probe_every == every
    assert (record.path / "stepsizes.jsonl").exists() == (every > 0)
    assert every == 0 or (record.path / "stepsizes.jsonl").read_text()


def test_an_optimizer_of_ones_own_lies_where_one_works(folder):
    (folder / "own.py").write_text(OWN)
    found = call("train", "digits", "--optimizer", "own:Own", "--set", "lr=0.01", *QUICK)
    assert found.exit_code == 0, found.output
    assert "own:Own lr=0.01 seed 0" in found.output


def test_processes_that_train_take_no_module_of_python_from_where_one_works(folder):
    (folder / "own.py").write_text("import theirs\n" + OWN)
    (folder / "theirs.py").write_text("")
    for name in ("random", "argparse", "sklearn"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was imported')")
    start = "import sys; sys.path.remove(''); from aida_lab.cli import app; app()"  # as in the script that pip installs
    words = ["train", "digits", "--optimizer", "own:Own", "--set", "lr=0.01", "--jobs", "2", "--seeds", "0,1", *QUICK]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", start, *words], capture_output=True, text=True, env=here, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each.state for each in records()] == ["finished", "finished"]


def test_a_failed_run_is_named_and_the_others_end(folder):
    (folder / "own.py").write_text(OWN)
    found = call("train", "digits", "--optimizer", "own:Broken", "--optimizer", "sgd", "--set", "lr=0.01", *QUICK)
    assert found.exit_code == 1
    assert "own:Broken lr=0.01 seed 0 failed: RuntimeError: this optimizer is broken" in found.output
    assert {(each.spec.optimizer, each.state) for each in records()} == {("own:Broken", "failed"), ("sgd", "finished")}
    listed = call("runs")
    assert "RuntimeError: this optimizer is broken" in listed.output


def test_a_diverged_run_is_no_failure():
    found = call("train", "digits", "--optimizer", "sgd", "--set", "lr=1e30", *QUICK)
    assert found.exit_code == 0, found.output
    assert "sgd lr=1e+30 seed 0: diverged at epoch 1/2: the loss was" in found.output


def test_tensorboard_gets_every_number_of_an_epoch_at_its_step():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert call("train", "digits", "--log", "tensorboard", *QUICK).exit_code == 0
    (record,) = records()
    board = EventAccumulator(str(record.path / "tensorboard"))
    board.Reload()
    rows = read_curve(record.path)
    for name in ("loss", "lr", "accuracy", "seconds"):
        scalars = board.Scalars(f"epoch/{name}")
        assert [each.step for each in scalars] == [row["step"] for row in rows]
        assert [each.value for each in scalars] == pytest.approx([row[name] for row in rows])


def test_torchrun_and_jobs_are_not_mixed(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = call("train", "digits", "--jobs", "2")
    assert found.exit_code == 2
    assert "use one of the two" in found.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--shard", "fsdp", "--jobs", "2"), 2, "use one of the two"),
        (("--shard", "tp"), 2, "--shard 'tp' is not known; known: fsdp"),
        (("--shard", "fsdp"), 1, "digits cannot be sharded"),
    ],
)
def test_what_cannot_be_sharded_ends_in_one_line(arguments, code, words):
    found = call("train", "digits", *arguments, *QUICK)
    assert found.exit_code == code
    assert words in " ".join(found.output.split())
    assert "Traceback" not in found.output


def test_runs_are_listed_filtered_and_given_as_json():
    assert call("train", "digits", "--optimizer", "adam", "--set", "eps=1e-4", *QUICK).exit_code == 0
    (record,) = records()
    found = call("runs")
    assert found.exit_code == 0, found.output
    line = next(line for line in found.output.splitlines() if record.path.name in line)
    for part in ("digits", "adam eps=0.0001", "finished", "accuracy", "2/2"):
        assert part in line
    (as_json,) = json.loads(call("runs", "--json").output)
    assert as_json["key"] == record.path.name
    assert as_json["best"] == record.result["best"]
    assert as_json["differing"] == {"eps": 1e-4}
    assert json.loads(call("runs", "--state", "failed", "--json").output) == []
    assert len(json.loads(call("runs", "runs", "--experiment", "digits", "--state", "finished", "--json").output)) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("nowhere",), "no runs at nowhere"),
        (
            (".", "--state", "odd"),
            "--state 'odd' is not known; known: finished, diverged, running, stopped, failed, damaged",
        ),
        ((".", "--experiment", "digits"), "no run of 'digits' in .; there are runs of nothing"),
    ],
)
def test_runs_that_cannot_be_listed_are_one_line(words, line):
    found = call("runs", *words)
    assert found.exit_code == 2
    assert line in found.output


def test_a_damaged_run_is_listed_with_what_is_wrong():
    assert call("train", "digits", *QUICK).exit_code == 0
    (record,) = records()
    (record.path / "result.json").write_text("{")
    found = call("runs")
    assert found.exit_code == 0
    assert "damaged" in found.output
    assert "result.json is damaged" in found.output


def test_a_run_whose_curve_was_lost_is_not_called_done():
    assert call("train", "digits", *QUICK).exit_code == 0
    (record,) = records()
    (record.path / "curve.jsonl").write_text("")
    found = call("train", "digits", *QUICK)
    assert found.exit_code == 1
    assert f"Remove {record.path}, and the same command" in " ".join(found.output.split())


def test_ctrl_c_saves_and_the_same_words_go_on(folder):
    words = [sys.executable, "-m", "aida_lab", "train", "digits", "--limit", "2", "--device", "cpu"]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([*words, "--epochs", "100000"], stdout=subprocess.PIPE, text=True, env=here)
    assert process.stdout.readline().startswith("aida-k2 seed 0: started")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "saved; the same command resumes it" in said
    (record,) = records()
    assert record.state == "stopped"
    again = subprocess.Popen([*words, "--epochs", "100000"], stdout=subprocess.PIPE, text=True, env=here)
    assert again.stdout.readline().startswith("aida-k2 seed 0: started, resumed at epoch")
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert again.returncode == 130
