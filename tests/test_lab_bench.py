"""Epochs timed side by side, and several at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aida.cli import app
from aida.lab.bench import Timing

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


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


def test_an_unknown_experiment_is_named_with_the_known() -> None:
    done = CliRunner().invoke(app, ["bench", "train", "digit"])
    assert done.exit_code == 2
    assert "did you mean 'digits'" in done.output
