"""Checkpoints and curves belong to one run: what is of another, was edited, or was written by two is noticed."""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import replace

import pytest
import torch

from aida_lab.runs.checkpoints import save_checkpoint
from aida_lab.runs.files import StoreError
from aida_lab.runs.lock import RunLostError
from aida_lab.runs.records import DONE, read_run
from aida_lab.runs.store import RunFolder
from store_cases import RESULT, SPEC, advance, checkpoints, reopened, silently_loaded, weights_at


@pytest.fixture
def folder(tmp_path):
    with RunFolder.open(tmp_path / "ours", SPEC) as folder:
        yield folder


@pytest.fixture
def others(tmp_path):
    """A checkpoint of another seed."""
    with RunFolder.open(tmp_path / "theirs", replace(SPEC, seed=1)) as folder:
        advance(folder, 1)
        yield checkpoints(folder)[0]


def put_into(folder, checkpoint):
    target = folder.path / "checkpoints" / checkpoint.name.replace("00000001", "00000009")
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(checkpoint, target)
    return target


def test_a_checkpoint_of_another_seed_is_not_gone_on_with(folder, others):
    advance(folder, 1)
    foreign = put_into(folder, others)
    with reopened(folder) as again:
        with pytest.warns(UserWarning, match=f"{foreign} is not used: it belongs to run {replace(SPEC, seed=1).key}"):
            state = again.load()
        assert torch.equal(state["weights"], weights_at(1))
        assert silently_loaded(again)["step"] == 1


def test_a_checkpoint_of_another_seed_alone_is_an_error(folder, others):
    foreign = put_into(folder, others)
    with pytest.raises(
        StoreError, match=rf"{foreign} cannot be used: it belongs to run .*, and this is {SPEC.key}.*remove"
    ):
        folder.load()
    assert foreign.exists()


def test_a_checkpoint_made_before_it_said_whose_it_is_is_gone_on_with(folder):
    folder.append_row({"epoch": 1})
    length = (folder.path / "curve.jsonl").stat().st_size
    save_checkpoint(folder.path / "checkpoints", {"step": 1, "logs": {"curve.jsonl": length}, "state": {"x": 1}}, 1)
    with reopened(folder) as again:
        assert silently_loaded(again) == {"x": 1}
        again.append_row({"epoch": 2})
        again.finish(RESULT)


def edit(folder, old, new):
    curve = folder.path / "curve.jsonl"
    text = curve.read_text()
    assert old in text
    curve.write_text(text.replace(old, new, 1))


def test_a_digit_changed_in_the_curve_is_noticed_when_the_run_goes_on(folder):
    advance(folder, 1)
    advance(folder, 2)
    folder.close()
    edit(folder, "1.0", "1.1")
    with RunFolder.open(folder.path.parent, SPEC) as again:
        with pytest.raises(StoreError, match=r"curve\.jsonl is not what it was when it was saved: a row was changed"):
            again.load()
        edit(folder, "1.1", "1.0")
        assert silently_loaded(again)["step"] == 2


def test_a_digit_changed_in_the_last_row_costs_that_row(folder):
    advance(folder, 1)
    advance(folder, 2)
    folder.close()
    edit(folder, "0.5", "0.6")
    with RunFolder.open(folder.path.parent, SPEC) as again:
        with pytest.warns(UserWarning, match="a row was changed"):
            assert again.load()["step"] == 1
        advance(again, 2)
        again.finish(RESULT)
        assert [row["loss"] for row in again.rows()] == [1.0, 0.5]


@pytest.mark.parametrize("end", [lambda folder: advance(folder, 3), lambda folder: folder.finish(RESULT)])
@pytest.mark.parametrize(
    "change",
    [
        lambda folder: edit(folder, "0.5", "0.6"),
        lambda folder: (folder.path / "curve.jsonl").write_text("".join(lines_of(folder)[:1])),
        lambda folder: (folder.path / "curve.jsonl").write_text("".join(lines_of(folder) * 2)),
        lambda folder: (folder.path / "curve.jsonl").unlink(),
    ],
    ids=["edited", "cut off", "twice", "gone"],
)
def test_a_run_ends_only_with_the_curve_that_it_measured(folder, change, end):
    advance(folder, 1)
    folder.append_row({"epoch": 2, "loss": 0.5})
    change(folder)
    with pytest.raises(StoreError, match=r"curve\.jsonl does not hold what this process wrote"):
        end(folder)
    assert read_run(folder.path).state not in DONE
    assert not (folder.path / "result.json").exists()


def lines_of(folder):
    return (folder.path / "curve.jsonl").read_text().splitlines(keepends=True)


# --- two processes, one folder


def assert_the_second_has_it(first, second):
    """Of two that write in turns, from where each stands."""
    for write in (lambda: first.append_row({"epoch": 1}), lambda: first.save({}, 1), lambda: first.finish(RESULT)):
        with pytest.raises(RunLostError, match="was removed, or taken by another process"):
            write()
    first.close()  # and does not let go of what is the other's
    second.load()
    for epoch in (1, 2):
        second.append_row({"epoch": epoch})
    second.finish(RESULT)
    assert [row["epoch"] for row in second.rows()] == [1, 2]


def test_a_folder_made_again_after_it_was_removed_is_not_written_by_the_first(folder):
    folder.append_row({"epoch": 1})
    shutil.rmtree(folder.path)
    with RunFolder.open(folder.path.parent, SPEC) as second:
        assert_the_second_has_it(folder, second)


def test_a_folder_that_was_removed_is_not_made_again_by_a_row(folder):
    shutil.rmtree(folder.path)
    with pytest.raises(RunLostError):
        folder.append_row({"epoch": 1})
    assert not folder.path.exists()


def test_where_locks_keep_nobody_out_the_second_has_the_folder(folder, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    folder.append_row({"epoch": 1})
    with RunFolder.open(folder.path.parent, SPEC) as second:
        assert_the_second_has_it(folder, second)


def test_a_lock_on_a_full_disk_is_still_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with monkeypatch.context() as patch:
        patch.setattr("aida_lab.runs.store._keep_spec", lambda *_: None)
        folder = RunFolder.open(tmp_path, SPEC)
    monkeypatch.undo()
    with folder:
        folder.append_row({"epoch": 1})


# --- begun again


def test_what_a_run_came_to_is_put_aside_when_it_begins_again(folder):
    for result in (RESULT, {**RESULT, "steps": 48}):
        folder.begin_session({})
        advance(folder, 1)
        advance(folder, 2)
        folder.finish(result)
        folder = reopened(folder)
        folder.restart()
        assert folder.result is None
        assert folder.load() is None
        assert folder.rows() == []
        assert json.loads((folder.path / "before" / "result.json").read_text()) == result
        assert len((folder.path / "before" / "curve.jsonl").read_text().splitlines()) == 2
    assert len(folder.sessions()) == 2
    folder.close()
