"""Epochs timed side by side, and several at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aida_lab.bench import Timing
from aida_lab.cli import app

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


HOPELESS = """
from torch.optim import SGD


class Hopeless(SGD):
    def __init__(self, params, lr=1e30):
        super().__init__(params, 1e30)
"""


def timed(tmp_path: Path, *words: str) -> tuple[str, dict]:
    out = tmp_path / "bench.json"
    command = ["bench", "train", "digits", "--device", "cpu", "--limit", "3", "--out", str(out), *words]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert out.with_suffix(".md").read_text() in done.output
    return done.output, json.loads(out.read_text())


def test_methods_take_turns_and_are_compared_with_adamw(tmp_path: Path) -> None:
    text, found = timed(tmp_path, "--epochs", "2", "--optimizer", "adamw", "--optimizer", "aida-k1")
    first, second = found["timings"]
    assert (first["method"], second["method"]) == ("adamw", "aida-k1")
    assert len(second["seconds"]) == 2
    assert second["steps"] == 3
    assert "1.000×" in text
    # of 38,282 parameters: a step takes no longer than the three steps of an epoch
    assert all(0 < each["optimizer_seconds"] < max(each["seconds"]) for each in found["timings"])
    assert re.search(r"\| \d+\.\d% \| 2 \|", text)
    assert found["machine"]["versions"]["torch"]


@pytest.mark.slow
def test_runs_at_once_share_their_time(tmp_path: Path) -> None:
    _, found = timed(tmp_path, "--epochs", "1", "--optimizer", "aida", "--jobs", "2")
    (timing,) = found["timings"]
    assert timing["jobs"] == 2
    assert len(timing["seconds"]) == 2, "one epoch of each of the two"


def test_an_epoch_at_once_is_divided_among_the_runs() -> None:
    timing = Timing("e", "m", "bf16", True, 4, 10, (2.0, 4.0, 6.0), (0.4, 0.4, 0.4))
    assert timing.training == 1.0
    assert timing.epoch == pytest.approx(1.1)
    assert timing.spread == pytest.approx(0.25)
    assert timing.share is None
    assert replace(timing, jobs=1, optimizer_seconds=0.1).share == pytest.approx(0.25)


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "said"), [("1", "the loss is not finite"), ("2", "2 of 2 runs did not finish")])
def test_epochs_of_a_run_that_diverged_are_no_timing(tmp_path: Path, jobs: str, said: str) -> None:
    (tmp_path / "hopeless.py").write_text(HOPELESS)
    words = ["--epochs", "1", "--limit", "3", "--optimizer", "hopeless:Hopeless", "--jobs", jobs, "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "aida_lab", "bench", "train", "digits", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--device", "gpu"), "neither cuda nor cpu"), (("--out", "no/such/bench.json"), "there is no folder")],
)
def test_words_without_a_meaning_are_refused_before_anything_is_measured(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "train", "digits", *words])
    assert done.exit_code == 2
    assert said in done.output


def test_an_unknown_experiment_is_named_with_the_known() -> None:
    done = CliRunner().invoke(app, ["bench", "train", "digit"])
    assert done.exit_code == 2
    assert "did you mean 'digits'" in done.output
