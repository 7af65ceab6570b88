"""Records of finished runs, brought together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aida_lab.cli import app
from aida_lab.runs.collecting import collect
from aida_lab.runs.store import read_run, scan
from report_fixture import spec, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in range(2):
        write_run(tmp_path / "runs", spec("aida-k2", seed), [80.0, 85.0, 90.0, 89.0])
    finished = scan(tmp_path / "runs")[0].path
    (finished / "checkpoints").mkdir()
    (finished / "checkpoints" / "00000001-0000000000000000.pt").write_bytes(b"weights")
    unfinished = scan(tmp_path / "runs")[1].path
    (unfinished / "result.json").unlink()
    return tmp_path / "runs"


def test_finished_runs_are_copied_without_their_weights(runs: Path, tmp_path: Path) -> None:
    found = collect([runs], tmp_path / "results")
    (record,) = scan(tmp_path / "results")
    assert (record.state, record.path) == ("finished", found.added[0])
    assert record.result == next(each.result for each in scan(runs) if each.state == "finished")
    assert not (record.path / "checkpoints").exists()
    assert [reason for _, reason in found.left] == ["stopped"]
    assert found.size == sum(path.stat().st_size for path in record.path.iterdir() if path.name != "lock")


def test_collecting_again_adds_nothing(runs: Path, tmp_path: Path) -> None:
    collect([runs], tmp_path / "results")
    again = collect([runs], tmp_path / "results")
    assert (again.added, again.known) == ((), 1)


def test_two_results_of_one_spec_are_not_mixed(runs: Path, tmp_path: Path) -> None:
    (kept,) = collect([runs], tmp_path / "results").added
    result = json.loads((kept / "result.json").read_text())
    (kept / "result.json").write_text(json.dumps({**result, "best": 91.0}))
    write_run(tmp_path / "runs", spec("adam", 0), [80.0, 85.0, 90.0, 89.0])
    found = collect([runs], tmp_path / "results")
    assert [record.spec.optimizer for record in map(read_run, found.added)] == ["adam"]
    ((folder, reason),) = [each for each in found.left if "another result" in each[1]]
    assert folder.name == kept.name
    assert reason.startswith(f"the same spec as {kept} with another result")


def test_the_command_says_what_it_did(runs: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["collect", str(runs), "--out", str(tmp_path / "results")])
    assert done.exit_code == 0
    assert "added 1 runs" in done.output
    assert "is stopped" in done.output


def test_nothing_that_a_link_leads_to_is_copied(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key")
    (run,) = (record.path for record in scan(runs) if record.state == "finished")
    (run / "stepsizes.jsonl").symlink_to(tmp_path / "secret")
    found = collect([runs], tmp_path / "results")
    assert [path.name for path in found.added] == [run.name]
    assert not (found.added[0] / "stepsizes.jsonl").exists()
    said = dict(found.left)[run / "stepsizes.jsonl"]
    assert said == "not copied: cannot be read: it is a symbolic link, and links are not followed"


def test_no_link_in_the_results_is_written_through(runs: Path, tmp_path: Path) -> None:
    (run,) = (record.path for record in scan(runs) if record.state == "finished")
    (tmp_path / "outside").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / run.name).symlink_to(tmp_path / "outside")
    found = collect([runs], tmp_path / "results")
    assert found.added == ()
    assert "is a symbolic link" in dict(found.left)[run]
    assert list((tmp_path / "outside").iterdir()) == []


def test_what_a_killed_collection_left_is_completed_and_its_half_files_go(runs: Path, tmp_path: Path) -> None:
    (run,) = (record.path for record in scan(runs) if record.state == "finished")
    target = tmp_path / "results" / run.name
    target.mkdir(parents=True)
    (target / "spec.json").write_bytes((run / "spec.json").read_bytes())
    (target / ".curve.jsonl.12345.tmp").write_text("half")
    (target / ".mine.tmp").write_text("somebody's")
    collect([runs], tmp_path / "results")
    names = sorted(path.name for path in target.iterdir())
    assert names == [".mine.tmp", "curve.jsonl", "env.json", "result.json", "spec.json"]
    assert [record.state for record in scan(tmp_path / "results")] == ["finished"]
