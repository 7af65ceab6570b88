"""A run's folder: what it holds, logs that go on exactly, one process at a time, a full disk."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import threading
from dataclasses import replace

import pytest

from aida.stepsizes.sinks import JsonLines
from aida_lab.runs.files import StoreError, writing
from aida_lab.runs.lock import RunBusyError
from aida_lab.runs.records import read_sessions
from aida_lab.runs.store import RunFolder
from store_cases import (
    RESULT,
    SPEC,
    advance,
    checkpoints,
    files_in,
    hold,
    hold_with_a_fork,
    process,
    refusing_writes,
    reopened,
    silently_loaded,
)


@pytest.fixture
def folder(tmp_path):
    with RunFolder.open(tmp_path, SPEC) as folder:
        yield folder


# --- the folder


def test_a_run_leaves_its_spec_its_sessions_its_curve_and_its_result(tmp_path):
    with RunFolder.open(tmp_path, SPEC) as folder:
        assert folder.result is None
        assert folder.load() is None
        folder.begin_session({"device": "cpu", "threads": 2})
        advance(folder, 1)
        advance(folder, 2)
        folder.finish(RESULT)
        assert folder.result == RESULT
    run = tmp_path / SPEC.key
    assert files_in(run) == ["curve.jsonl", "env.json", "lock", "result.json", "spec.json", "stepsizes.jsonl"]
    assert json.loads((run / "spec.json").read_text()) == SPEC.to_json()
    (session,) = read_sessions(run)
    assert session["device"] == "cpu"
    assert session["started"].endswith("+00:00")
    with RunFolder.open(tmp_path, SPEC) as folder:
        assert folder.result == RESULT
        assert folder.rows() == [{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5}]


def test_every_session_is_kept_and_removes_the_failure_before_it(folder):
    folder.begin_session({"threads": 1})
    folder.fail("CUDA out of memory\nand so on", "Traceback ...")
    assert json.loads((folder.path / "failed.json").read_text()) == {
        "error": "CUDA out of memory",
        "trace": "Traceback ...",
    }
    folder.begin_session({"threads": 2})
    assert [each["threads"] for each in read_sessions(folder.path)] == [1, 2]
    assert not (folder.path / "failed.json").exists()


def test_equal_results_are_equal_bytes_without_numbers_that_json_has_not(tmp_path):
    ends = []
    for name, result in (
        ("a", {"state": "diverged", "best": float("nan"), "last": float("inf")}),
        ("b", {"last": float("-inf"), "best": None, "state": "diverged"}),
    ):
        with RunFolder.open(tmp_path / name, SPEC) as folder:
            folder.append_row({"epoch": 1, "loss": float("nan")})
            folder.finish(result)
            assert folder.rows() == [{"epoch": 1, "loss": None}]
            ends.append((folder.path / "result.json").read_bytes())
    assert ends[0] == ends[1] == b'{\n  "best": null,\n  "last": null,\n  "state": "diverged"\n}\n'


def test_a_finished_run_is_not_written_again(folder):
    advance(folder, 1)
    folder.finish(RESULT)
    for write in (
        folder.load,
        lambda: advance(folder, 3),
        lambda: folder.begin_session({}),
        lambda: folder.finish(RESULT),
    ):
        with pytest.raises(ValueError, match="has a result"):
            write()
    assert folder.rows() == [{"epoch": 1, "loss": 1.0}]


def test_a_closed_folder_is_not_written(folder):
    folder.close()
    with pytest.raises(ValueError, match="was closed"):
        folder.append_row({"epoch": 1})


def test_a_result_has_one_of_two_states(folder):
    with pytest.raises(ValueError, match="finished or diverged, not 'done'"):
        folder.finish({"state": "done"})


def test_a_spec_that_differs_from_its_name_is_refused(folder):
    (folder.path / "spec.json").write_text(json.dumps(replace(SPEC, seed=7, batch=32).to_json()))
    with pytest.raises(StoreError, match=r"spec\.json is not the spec of this run.*differs in: batch, seed"):
        reopened(folder)
    (folder.path / "spec.json").write_text("{")
    with pytest.raises(StoreError, match=r"spec\.json is damaged.*Remove that file"):
        reopened(folder)
    (folder.path / "spec.json").unlink()
    reopened(folder).close()  # neither refusal kept the lock
    assert json.loads((folder.path / "spec.json").read_text()) == SPEC.to_json()


def test_an_infinite_hyper_parameter_gives_its_run_back(tmp_path):
    spec = replace(SPEC, hyper={"clip_norm": float("inf")})
    for _ in range(2):
        RunFolder.open(tmp_path, spec).close()


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(folder):
    advance(folder, 1)
    before = files_in(folder.path)
    for name in (".result.json.123.tmp", "checkpoints/.00000002.123.tmp"):
        (folder.path / name).write_bytes(b"half")
    with reopened(folder) as again:
        assert files_in(again.path) == before
        assert silently_loaded(again)["step"] == 1


def test_a_kill_between_the_result_and_the_removal_of_checkpoints_leaves_none(folder):
    advance(folder, 1)
    advance(folder, 2)
    (folder.path / "result.json").write_text(json.dumps(RESULT))
    with reopened(folder) as again:
        assert again.result == RESULT
        assert not (again.path / "checkpoints").exists()


# --- logs


def test_logs_are_cut_back_to_the_checkpoint(folder):
    advance(folder, 1)
    curve, stepsizes = (folder.path / "curve.jsonl").read_bytes(), (folder.path / "stepsizes.jsonl").read_bytes()
    folder.append_row({"epoch": 2, "loss": 0.5})
    with (folder.path / "stepsizes.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"st')
    with (folder.path / "curve.jsonl").open("a") as file:
        file.write('{"epoch": 3, "lo')
    with reopened(folder) as again:
        assert silently_loaded(again)["step"] == 1
        assert (again.path / "curve.jsonl").read_bytes() == curve
        assert (again.path / "stepsizes.jsonl").read_bytes() == stepsizes


def test_logs_without_a_checkpoint_begin_again(folder):
    folder.append_row({"epoch": 1})
    assert folder.load() is None
    assert (folder.path / "curve.jsonl").read_bytes() == b""
    assert not (folder.path / "stepsizes.jsonl").exists()


def test_a_checkpoint_beyond_the_end_of_a_log_is_not_used(folder):
    advance(folder, 1)
    length = (folder.path / "stepsizes.jsonl").stat().st_size
    advance(folder, 2)
    newest = checkpoints(folder)[0]
    os.truncate(folder.path / "stepsizes.jsonl", length)
    with pytest.warns(UserWarning, match=rf"{newest} is not used: .*stepsizes\.jsonl has 12 bytes, and had 24"):
        assert folder.load()["step"] == 1
    assert checkpoints(folder)[0].name.startswith("00000001")


def test_a_whole_checkpoint_is_never_thrown_away_for_a_lost_log(folder):
    advance(folder, 1)
    (folder.path / "curve.jsonl").rename(folder.path / "mine.jsonl")
    with pytest.raises(StoreError, match=r"curve\.jsonl has 0 bytes.*Restore that file"):
        folder.load()
    (folder.path / "mine.jsonl").rename(folder.path / "curve.jsonl")
    assert silently_loaded(folder)["step"] == 1


# --- the lock


def test_two_processes_never_have_one_run_and_a_kill_frees_it(tmp_path):
    with process(hold, tmp_path) as (child, said):
        holder = said.recv()
        with pytest.raises(
            RunBusyError, match=f"{SPEC.key} is being trained by process {holder} on {socket.gethostname()}"
        ):
            RunFolder.open(tmp_path, SPEC)
        RunFolder.open(tmp_path, replace(SPEC, seed=1)).close()
        child.kill()
        child.join()
        RunFolder.open(tmp_path, SPEC).close()


def test_the_forks_of_a_killed_process_do_not_keep_its_lock(tmp_path):
    with process(hold_with_a_fork, tmp_path) as (child, said):
        fork = said.recv()
        try:
            with pytest.raises(RunBusyError):
                RunFolder.open(tmp_path, SPEC)
            child.kill()
            child.join()
            RunFolder.open(tmp_path, SPEC).close()
            os.kill(fork, 0)  # still there
        finally:
            os.kill(fork, signal.SIGKILL)


def test_one_process_does_not_have_a_run_twice(folder):
    with pytest.raises(RunBusyError, match=f"process {os.getpid()} "):
        RunFolder.open(folder.path.parent, SPEC)
    reopened(folder).close()
    assert (folder.path / "lock").read_text() == ""


def test_who_only_looks_keeps_nobody_out(tmp_path):
    RunFolder.open(tmp_path, SPEC).close()
    looking = os.open(tmp_path / SPEC.key / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    done = threading.Timer(0.05, os.close, [looking])
    done.start()
    RunFolder.open(tmp_path, SPEC).close()
    done.join()


# --- a full disk


def test_a_row_without_room_is_not_there_in_part(folder):
    folder.append_row({"epoch": 1})
    with refusing_writes(after=5), pytest.raises(StoreError, match=r"curve\.jsonl: No space left.*it takes 13 bytes"):
        folder.append_row({"epoch": 2})
    folder.append_row({"epoch": 2})
    assert folder.rows() == [{"epoch": 1}, {"epoch": 2}]


def test_a_result_without_room_leaves_the_run_as_it_was(folder):
    advance(folder, 2)
    with refusing_writes(after=5), pytest.raises(StoreError, match=r"result\.json: No space left"):
        folder.finish(RESULT)
    assert folder.result is None
    assert silently_loaded(folder)["step"] == 2
    folder.finish(RESULT)


def test_a_failure_without_room_does_not_hide_the_failure(folder):
    with refusing_writes(after=0), pytest.warns(UserWarning, match=r"could not be recorded: .*failed\.json"):
        folder.fail("the disk is full")
    assert not (folder.path / "failed.json").exists()


def test_other_writers_of_the_folder_report_a_full_disk_alike(folder):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    (folder.path / "stepsizes.jsonl").symlink_to("/dev/full")
    sink = JsonLines(folder.path / "stepsizes.jsonl")
    sink._file.write("{}\n")
    message = r"stepsizes\.jsonl: No space left on device\. What was saved before is whole"
    with pytest.raises(StoreError, match=message), writing(folder.path / "stepsizes.jsonl"):
        sink.close()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write .*: Not a directory; choose a folder that can be written"):
        RunFolder.open(tmp_path / "file", SPEC)
