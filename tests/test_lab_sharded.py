"""One run sharded over several processes: the curve is that of one process, and any number of processes resumes it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aida.catalog import catalog
from aida_lab import distributed
from aida_lab.events import Event
from aida_lab.experiments import experiments, find_experiment
from aida_lab.request import RunRequest
from aida_lab.runs.checkpoints import checkpoint_files
from aida_lab.runs.records import read_curve, read_sessions
from aida_lab.spec import RunSpec
from aida_lab.training.options import Options
from aida_lab.training.run import run
from processes import Refused, together
from tiny_lab import tiny

pytestmark = pytest.mark.slow

#: Those that need whole layers, or are exact for whole matrices only.
REFUSED = {"fromage": "DTensor"}
#: A checkpoint after every step.
SHARDED = Options(device="cpu", threads=1, shard="fsdp", checkpoint_seconds=1e-9)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small transformer in this process, too."""
    tiny(monkeypatch.setattr)


def spec_of(optimizer: str = "aida", *, epochs: int = 3, limit: int | None = None, **given: Any) -> RunSpec:
    """With a learning rate that the first steps of the warm-up do not make too small to see.

    eps is above the rounding of the gradients: below it, rounding decides the steps of elements without a gradient.
    """
    experiment = find_experiment("transformer-multi30k")
    hyper = {"lr": 200.0, **({"eps": 1e-6} if "eps" in experiment.tuned(optimizer) else {}), **given}
    return RunRequest(experiment, (optimizer,), hyper, epochs=epochs, limit=limit).specs()[0]


def train(spec: Mapping[str, Any], out: Path, steps: int = 0) -> Mapping[str, Any]:
    """Train a run with all processes that were started; leave it after so many steps, as if it was killed."""
    tiny()
    taken = 0

    def listen(event: Event) -> None:
        nonlocal taken
        taken += event.kind == "step"
        if taken and taken == steps:
            raise TimeoutError("left")

    return run(RunSpec.from_json(spec), out, SHARDED, listen)


def assert_same_curve(found: Path, wanted: Path) -> None:
    """Equal to rounding; the accuracy counts words, so it is equal."""
    mine, theirs = read_curve(found), read_curve(wanted)
    assert [row["epoch"] for row in mine] == [row["epoch"] for row in theirs] != []
    for one, other in zip(mine, theirs, strict=True):
        assert one["accuracy"] == pytest.approx(other["accuracy"], rel=1e-9)
        for key in ("loss", "lr", "step"):
            assert one[key] == pytest.approx(other[key], rel=3e-7), key
        # its logarithm is the loss of the evaluation, which is added up in float32 as the loss is
        assert math.log(one["valid_ppl"]) == pytest.approx(math.log(other["valid_ppl"]), rel=3e-7)
        assert one["valid_ppl"] != pytest.approx(theirs[0]["valid_ppl"], rel=1e-4) or one["epoch"] == 1


def assert_processes(folder: Path, *counts: int) -> None:
    assert [session["processes"] for session in read_sessions(folder)] == list(counts)


@pytest.mark.sharding
def test_two_processes_train_with_each_optimizer_as_one_does_or_it_refuses(small: None, tmp_path: Path) -> None:
    specs = {name: spec_of(name, epochs=1, limit=2) for name in catalog()}
    done = together(*(partial(train, spec.to_json(), tmp_path / "two") for spec in specs.values()))
    for (name, spec), answers in zip(specs.items(), done, strict=True):
        if name in REFUSED:
            assert all(isinstance(each, Refused) and REFUSED[name] in each.words for each in answers), name
            continue
        assert answers[0] == answers[1], name
        assert answers[0]["state"] == "finished", name
        run(spec, tmp_path / "one", SHARDED)
        assert_same_curve(tmp_path / "two" / spec.key, tmp_path / "one" / spec.key)


@pytest.mark.sharding
def test_three_processes_then_one_then_two_continue_one_run(small: None, tmp_path: Path) -> None:
    spec = spec_of()
    folder = tmp_path / "several" / spec.key
    (left,) = together(partial(train, spec.to_json(), folder.parent, 6), ranks=3)
    assert {each.kind for each in left} == {"TimeoutError"}
    shapes = saved_shapes(folder)
    with pytest.raises(TimeoutError):
        train(spec.to_json(), folder.parent, 3)
    assert saved_shapes(folder) == shapes
    (done,) = together(partial(train, spec.to_json(), folder.parent))
    assert done[0]["state"] == "finished"
    run(spec, tmp_path / "one", SHARDED)
    assert_same_curve(folder, tmp_path / "one" / spec.key)
    assert_processes(folder, 3, 1, 2)


def saved_shapes(folder: Path) -> dict[str, Any]:
    """Names and shapes of all tensors in the newest checkpoint."""
    content = torch.load(checkpoint_files(folder / "checkpoints")[0].path, weights_only=True)
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(content["state"])
    return {str(path): (type(leaf), leaf.shape) for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def torchrun(ranks: int, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(Path(__file__).with_name("tiny_lab.py"))
    values = [word for value in ("lr=200", "eps=1e-6") for word in ("--set", value)]
    options = ["--shard", "fsdp", "--epochs", "3", "--device", "cpu", "--checkpoint-seconds", "1e-9", "--out", str(out)]
    return subprocess.run(
        [*launcher, script, "train", "transformer-multi30k", *options, *values],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        check=False,
    )


def test_two_processes_end_the_run_of_four_of_which_one_was_killed(small: None, tmp_path: Path) -> None:
    spec = spec_of()
    killed = torchrun(4, tmp_path / "several", TINY_KILL="2:7")  # in the second of three epochs
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    again = torchrun(2, tmp_path / "several")
    assert again.returncode == 0, again.stderr
    assert "resumed with other processes: 4 before, 2 now" in again.stdout
    assert again.stdout.count("resumed at epoch 1") == 1, "rank 0 alone prints"
    run(spec, tmp_path / "one", SHARDED)
    folder = tmp_path / "several" / spec.key
    assert_same_curve(folder, tmp_path / "one" / spec.key)
    assert_processes(folder, 4, 2)


# -- what is refused, and how ------------------------------------------------------------------------


def test_an_experiment_that_cannot_be_sharded_says_which_can(tmp_path: Path) -> None:
    spec = RunRequest(find_experiment("digits"), epochs=1).specs()[0]
    with pytest.raises(ValueError, match=r"digits cannot be sharded; leave --shard out.*: gpt-pysource, transf"):
        run(spec, tmp_path, SHARDED)


@pytest.mark.parametrize(
    ("shard", "probe", "words"),
    [(None, 0, "add --shard fsdp"), ("fsdp", 5, "--probe measures whole layers")],
)
def test_several_processes_say_what_they_cannot_do(
    shard: Any, probe: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(distributed, "world", lambda: 2)
    spec = RunRequest(find_experiment("transformer-multi30k"), probe_every=probe).specs()[0]
    with pytest.raises(ValueError, match=words):
        run(spec, tmp_path, Options(device="cpu", shard=shard))


def test_one_process_trains_without_sharding_and_says_so(small: None, tmp_path: Path) -> None:
    notes: list[str] = []
    run(spec_of(epochs=1, limit=1), tmp_path, SHARDED, lambda event: notes.append(event.text))
    assert any("nothing is sharded: torchrun --nproc-per-node N" in each for each in notes)


def test_every_way_of_training_together_has_an_experiment() -> None:
    assert {each.distributed for each in experiments().values()} == {"", "ddp", "fsdp"}
