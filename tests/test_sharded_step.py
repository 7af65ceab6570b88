"""The benchmark of the sharded step: every optimizer is measured on the same DTensors, on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rivals import AIDA_CLIP, AIDA_FUSED, BASELINE, CLIP_BASELINE
from sharded_step import main, parse, shapes_of


@pytest.mark.slow
def test_all_four_are_measured_side_by_side_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    main(["--device", "cpu", "--models", "small", "--repeats", "1", "--steps", "1", "--out", str(out)])
    record = json.loads(out.read_text())
    assert record["machine"]["ranks"] == 2
    measured = [(entry["mode"], entry["optimizer"]) for entry in record["entries"] if entry["n"] == 1]
    names = (BASELINE, CLIP_BASELINE, AIDA_FUSED, AIDA_CLIP)
    assert measured == [(mode, name) for mode in ("host", "eager") for name in names]


def test_a_gpu_has_one_rank_and_a_cpu_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--device", "cpu"]).ranks == 2
    assert parse(["--device", "cuda"]).ranks == 1
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", "--modes", "graph"])
    assert "need --device cuda" in capsys.readouterr().err


def test_small_is_300_tensors() -> None:
    assert shapes_of("small") == [(64, 64)] * 300
