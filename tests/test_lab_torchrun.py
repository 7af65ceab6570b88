"""One run by several processes that torchrun started: two of them, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from aida_lab.experiments import find_experiment
from aida_lab.request import RunRequest
from aida_lab.runs.records import scan
from aida_lab.spec import RunSpec

pytest.importorskip("PIL", reason="reads JPEG files")
pytestmark = pytest.mark.slow


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A data root with as many images as imagenet-sample has, all of them small."""
    import torch
    from PIL import Image

    chance = torch.Generator().manual_seed(0)
    for label in range(10):
        picture = Image.fromarray(torch.randint(0, 256, (40, 48, 3), generator=chance, dtype=torch.uint8).numpy())
        for split, count in (("train", 120), ("val", 45)):
            folder = tmp_path / "data" / "imagenet-sample" / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            picture.save(folder / "0.JPEG")
            for number in range(1, count):
                os.link(folder / "0.JPEG", folder / f"{number}.JPEG")
    return tmp_path / "data"


def torchrun(specs: Sequence[RunSpec], data: Path, out: Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("together.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, script, json.dumps([spec.to_json() for spec in specs]), str(data), str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def test_two_processes_train_one_run_after_the_other_and_find_them_done_afterwards(
    sample: Path, tmp_path: Path
) -> None:
    request = RunRequest(find_experiment("resnet18-imagenet"), epochs=2, variant="sample", limit=1, seeds=(0, 1))
    specs = [replace(spec, batch=4) for spec in request.specs()]
    first = torchrun(specs, sample, tmp_path / "runs")
    assert first.returncode == 0, first.stderr
    records = scan(tmp_path / "runs")
    assert [record.state for record in records] == ["finished", "finished"]
    for record in records:
        assert record.result is not None
        assert (record.result["epochs"], record.result["steps"]) == (2, 2)
        sessions = json.loads((record.path / "env.json").read_text())["sessions"]
        assert [session["processes"] for session in sessions] == [2]
    again = torchrun(specs, sample, tmp_path / "runs")
    assert again.returncode == 0, again.stderr
    assert all(len(json.loads((each.path / "env.json").read_text())["sessions"]) == 1 for each in records)


def test_an_experiment_for_one_process_says_so(tmp_path: Path) -> None:
    spec = RunRequest(find_experiment("digits"), epochs=1).specs()[0]
    done = torchrun([spec], tmp_path, tmp_path / "runs")
    assert done.returncode != 0
    assert "digits trains in one process" in done.stdout + done.stderr
