"""Runs as a list: every state seen for what it is, damage named, nothing disturbed."""

from __future__ import annotations

import ast
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import aida_lab
from aida_lab.runs.files import StoreError
from aida_lab.runs.records import RunRecord, read_curve, read_run, scan
from aida_lab.runs.store import RunFolder
from store_cases import RESULT, SPEC, advance, hold, process


def finished(out: Path, seed: int = 0) -> Path:
    with RunFolder.open(out, replace(SPEC, seed=seed)) as folder:
        folder.begin_session({})
        advance(folder, 1)
        advance(folder, 2)
        folder.finish(RESULT)
    return folder.path


def begun(out: Path) -> Path:
    with RunFolder.open(out, SPEC) as folder:
        advance(folder, 1)
    return folder.path


def only(out: Path) -> RunRecord:
    (record,) = scan(out)
    return record


# --- states


def test_a_finished_run_shows_its_spec_its_result_and_where_its_curve_ends(tmp_path):
    before = time.time() - 1
    path = finished(tmp_path)
    record = only(tmp_path)
    assert (record.path, record.state, record.spec, record.result) == (path, "finished", SPEC, RESULT)
    assert (record.rows, read_curve(record.path)[-1], record.problem) == (2, {"epoch": 2, "loss": 0.5}, "")
    assert before < record.changed <= time.time() + 1
    assert (record.path / "stepsizes.jsonl").exists()
    assert read_curve(path) == [{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5}]


def test_a_diverged_run_is_one_wherever_its_curve_ends(tmp_path):
    with RunFolder.open(tmp_path, SPEC) as folder:
        folder.finish({"state": "diverged", "reason": "the loss is NaN", "epochs": 0})
    record = only(tmp_path)
    assert (record.state, record.rows) == ("diverged", 0)
    assert record.result["reason"] == "the loss is NaN"


def test_a_run_is_running_while_its_process_lives_and_stopped_when_it_was_killed(tmp_path):
    with process(hold, tmp_path) as (child, said):
        said.recv()
        assert only(tmp_path).state == "running"
        child.kill()
        child.join()
        assert only(tmp_path).state == "stopped"


def test_a_failed_run_says_why_until_it_runs_again(tmp_path):
    with RunFolder.open(tmp_path, SPEC) as folder:
        folder.fail("no such file: train.bin", "Traceback ...")
        assert only(tmp_path).state == "running"
    record = only(tmp_path)
    assert (record.state, record.problem) == ("failed", "no such file: train.bin")
    with RunFolder.open(tmp_path, SPEC) as folder:
        folder.begin_session({})
    assert only(tmp_path).state == "stopped"


def test_a_row_that_is_being_written_is_not_read_yet(tmp_path):
    path = begun(tmp_path)
    with (path / "curve.jsonl").open("a") as file:
        file.write('{"epoch": 2, "loss": 0.')
    record = only(tmp_path)
    assert (record.state, read_curve(record.path)) == ("stopped", [{"epoch": 1, "loss": 1.0}])
    assert read_curve(path) == [{"epoch": 1, "loss": 1.0}]


def test_a_folder_that_is_just_being_made_is_running(tmp_path):
    with RunFolder.open(tmp_path, SPEC) as folder:
        (folder.path / "spec.json").unlink()
        record = only(tmp_path)
        assert (record.state, record.spec) == ("running", None)


# --- damage


def overwrite(name: str, content: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(content)


def edit_seed(run: Path) -> None:
    content = json.loads((run / "spec.json").read_text())
    (run / "spec.json").write_text(json.dumps({**content, "seed": 5}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no spec": (lambda run: (run / "spec.json").unlink(), "spec.json is not there"),
    "a torn spec": (overwrite("spec.json", '{"format": 1, "exp'), "spec.json is damaged: Unterminated string"),
    "bytes for a spec": (lambda run: (run / "spec.json").write_bytes(b"\xff\xfe\xfa"), "spec.json is damaged"),
    "a list for a spec": (overwrite("spec.json", "[]"), "spec.json is damaged: it holds no JSON object"),
    "another format": (overwrite("spec.json", '{"format": 0}'), "of another version: no spec of format 1: format 0"),
    "an edited spec": (edit_seed, "spec.json belongs in a folder named "),
    "an empty result": (overwrite("result.json", ""), "result.json is damaged"),
    "no result's state": (overwrite("result.json", '{"best": 1}'), "result.json is damaged: its state is None"),
    "a bad row": (overwrite("curve.jsonl", '{"epoch": 1}\n{"ep\n{"epoch": 2}\n'), "damaged: line 2 is no row"),
    "two rows in a line": (overwrite("curve.jsonl", '{"epoch": 1},{"epoch": 2}\n'), "curve.jsonl is damaged: line 1"),
    "a lost row": (overwrite("curve.jsonl", '{"epoch": 1}\n'), "epoch 1, and result.json counts 2"),
    "a torn row": (overwrite("curve.jsonl", '{"epoch": 1}\n{"epoch": 2}'), "curve.jsonl ends with epoch 1, and"),
    "more than its rows": (
        overwrite("curve.jsonl", '{"epoch": 1}\n{"epoch": 2}\n{"ep'),
        "curve.jsonl is cut off after epoch 2",
    ),
    "an epoch missing": (
        overwrite("curve.jsonl", '{"epoch": 2}\n'),
        "curve.jsonl is damaged: line 1 has epoch 2, not 1",
    ),
    "an epoch twice": (
        overwrite("curve.jsonl", '{"epoch": 1}\n{"epoch": 1}\n{"epoch": 2}\n'),
        "curve.jsonl is damaged: line 2 has epoch 1, not 2",
    ),
    "fewer epochs than asked for": (
        lambda run: (
            (run / "curve.jsonl").write_text('{"epoch": 1, "loss": 0.5}\n'),
            (run / "result.json").write_text(json.dumps({**RESULT, "epochs": 1, "best_epoch": 1})),
        ),
        "curve.jsonl ends with epoch 1, and spec.json asks for 2",
    ),
    "a better best than its curve's": (
        overwrite("result.json", json.dumps({**RESULT, "best": 0.01})),
        "result.json does not fit curve.jsonl: it says best 0.01 in epoch 2, last 0.5, and the curve best 0.5 in",
    ),
    "another last": (overwrite("result.json", json.dumps({**RESULT, "last": 0.4})), "last 0.4, and the curve best 0.5"),
    "another best epoch": (
        overwrite("result.json", json.dumps({**RESULT, "best_epoch": 1})),
        "it says best 0.5 in epoch 1",
    ),
    "no number at all": (
        overwrite("result.json", json.dumps({**RESULT, "best": "0.5"})),
        "result.json does not fit curve.jsonl: it says best '0.5'",
    ),
    "no curve": (lambda run: (run / "curve.jsonl").unlink(), "curve.jsonl ends with epoch 0"),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_listed_and_named_and_the_other_runs_stay(tmp_path, damage, problem):
    run, other = finished(tmp_path), finished(tmp_path, seed=1)
    damage(run)
    records = {record.path: record for record in scan(tmp_path)}
    assert records[other].state == "finished"
    assert (records[run].state, records[run].result) == ("damaged", None)
    assert problem in records[run].problem
    assert str(tmp_path) not in records[run].problem


def test_a_copy_of_a_run_does_not_count_as_another(tmp_path):
    run = finished(tmp_path)
    shutil.copytree(run, tmp_path / "copy")
    assert [record.state for record in scan(tmp_path)] == ["finished", "damaged"] or run.name > "copy"
    assert (
        read_run(tmp_path / "copy").problem
        == f"spec.json belongs in a folder named {run.name}: copied, renamed or edited"
    )


def test_a_damaged_curve_names_its_file_and_line(tmp_path):
    run = begun(tmp_path)
    with (run / "curve.jsonl").open("a") as file:
        file.write("5\n")
    with pytest.raises(StoreError, match=rf"{run}/curve\.jsonl is damaged: line 2 is no row"):
        read_curve(run)


# --- the list


def test_only_runs_are_listed(tmp_path):
    assert scan(tmp_path / "nothing") == []
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").touch()
    (tmp_path / "study.db").touch()
    (tmp_path / "0123456789abcdef").mkdir()
    record = only(tmp_path)
    assert (record.path.name, record.state) == ("0123456789abcdef", "damaged")
    with pytest.raises(StoreError, match="cannot be listed: Not a directory"):
        scan(tmp_path / "study.db")


def test_a_scan_changes_nothing(tmp_path):
    finished(tmp_path)
    begun(tmp_path / "other")
    (tmp_path / "0123456789abcdef").mkdir()

    def everything() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}

    before = everything()
    scan(tmp_path)
    scan(tmp_path / "other")
    assert everything() == before


def test_opening_a_finished_run_does_not_make_it_younger(tmp_path):
    finished(tmp_path)
    before = only(tmp_path).changed
    time.sleep(0.02)
    RunFolder.open(tmp_path, SPEC).close()
    assert only(tmp_path).changed == before


def test_thousands_of_runs_are_listed_in_seconds(tmp_path):
    row = {"step": 391, "lr": 1e-3, "loss": 0.5, "accuracy": 93.12345678, "seconds": 0.43210987654}
    curve = "".join(json.dumps({"epoch": epoch, **row}) + "\n" for epoch in range(1, 201))
    for seed in range(200):
        spec = replace(SPEC, seed=seed, epochs=200)
        run = tmp_path / spec.key
        run.mkdir()
        (run / "spec.json").write_text(json.dumps(spec.to_json()))
        (run / "curve.jsonl").write_text(curve)
        (run / "result.json").write_text(json.dumps({**RESULT, "epochs": 200, "best_epoch": 1}))
    start = time.process_time()
    records = scan(tmp_path)
    assert {record.state for record in records} == {"finished"}
    assert (time.process_time() - start) / 200 < 5e-3  # 1.3 ms a run where this was written


@pytest.mark.parametrize("name", ["store", "records", "files", "lock", "checkpoints"])
def test_the_store_itself_needs_no_torch_before_it_saves(name):
    tree = ast.parse((Path(aida_lab.__file__).parent / "runs" / f"{name}.py").read_text())
    tops = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert tops
    assert not any("torch" in ast.unparse(node) for node in tops)
