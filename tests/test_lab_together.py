"""Commands that meet in one folder, runs that end oddly, and what killed ones left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from aida_lab.events import Event
from aida_lab.experiments import find_experiment
from aida_lab.request import RunRequest
from aida_lab.runs.records import read_curve, read_run, scan
from aida_lab.runs.store import RunFolder
from aida_lab.stopping import Stop
from aida_lab.training.options import Options
from aida_lab.training.run import run
from aida_lab.workers.jobs import Jobs
from fake_runs import spec

CPU = Options(device="cpu", threads=1)
RUNNER = "fake_runs:run"


def all_of(specs, out, told=None, stop=None, jobs=1, runner=RUNNER):
    listen = (lambda event: None) if told is None else told.append
    return {each.key: each.state for each in Jobs(out, CPU, jobs, runner).work_all(specs, listen, stop or Stop())}


# --- two commands at once


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_another_process_has_is_waited_for_and_the_others_are_trained_meanwhile(tmp_path, jobs):
    first, second = spec(0), spec(1)
    held, told = RunFolder.open(tmp_path, first), []

    def listen(event):
        told.append(event)
        if "waiting for other processes that train 1 of the runs" in event.text:
            assert read_run(tmp_path / second.key).state == "finished", "meanwhile"
            threading.Timer(0.3, held.close).start()

    ended = list(Jobs(tmp_path, CPU, jobs, RUNNER).work_all([first, second], listen, Stop()))
    assert [(each.key, each.state) for each in ended] == [(second.key, "finished"), (first.key, "finished")]
    assert next(event.kind for event in told if event.run == first.key) == "note"


def test_the_result_that_another_process_brings_is_reported(tmp_path):
    theirs, told = RunFolder.open(tmp_path, spec(0)), []

    def end():
        for epoch in (1, 2):
            theirs.append_row({"epoch": epoch, "accuracy": 90.0 + epoch})
        found = {"metric": "accuracy", "better": "higher", "best": 92.0, "best_epoch": 2, "last": 92.0}
        theirs.finish({"state": "finished", **found, "epochs": 2})
        theirs.close()

    threading.Timer(0.5, end).start()
    assert all_of([spec(0)], tmp_path, told) == {spec(0).key: "skipped"}
    assert [event.row["best"] for event in told if event.kind == "skipped"] == [92.0]


def test_who_waits_can_be_stopped(tmp_path):
    stop = Stop()
    with RunFolder.open(tmp_path, spec(0)):
        threading.Timer(0.3, stop.ask).start()
        assert all_of([spec(0)], tmp_path, stop=stop) == {spec(0).key: "busy"}


@pytest.mark.slow
def test_two_identical_commands_at_once_both_end_well(tmp_path):
    words = [sys.executable, "-m", "aida_lab", "train", "digits", "--epochs", "9", "--seeds", "0,1", "--device", "cpu"]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    both = [
        subprocess.Popen(words, cwd=tmp_path, env=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [each.communicate(timeout=120)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    runs = scan(tmp_path / "runs")
    assert [each.state for each in runs] == ["finished", "finished"]
    assert all([row["epoch"] for row in read_curve(each.path)] == list(range(1, 10)) for each in runs)


def digits(seed=0):
    return RunRequest(find_experiment("digits"), ("sgd",), seeds=(seed,), epochs=6).specs()[0]


def test_a_folder_removed_under_a_run_is_left_to_the_next(tmp_path):
    made = digits()
    second = []

    def remove_and_train_again(event: Event) -> None:
        if event.kind == "epoch" and event.epoch == 3:
            shutil.rmtree(tmp_path / made.key)
            second.append(RunFolder.open(tmp_path, made))

    ended = list(Jobs(tmp_path, CPU).work([made], remove_and_train_again, Stop()))
    assert [each.state for each in ended] == ["failed"]
    assert "was removed, or taken by another process" in ended[0].error
    assert sorted(path.name for path in (tmp_path / made.key).iterdir()) == ["lock", "spec.json"], (
        "nothing of the first"
    )
    second[0].close()
    assert run(made, tmp_path, CPU)["epochs"] == 6
    assert [row["epoch"] for row in read_curve(tmp_path / made.key)] == [1, 2, 3, 4, 5, 6]


# --- odd ends


@pytest.mark.parametrize("error", [SystemExit(3), SystemExit("bye"), GeneratorExit()], ids=repr)
def test_a_step_that_wants_to_end_the_process_fails_its_run_alone(tmp_path, monkeypatch, error):
    step = torch.optim.Adam.step

    def end(*words, **named):
        raise error

    monkeypatch.setattr(torch.optim.Adam, "step", end)
    broken = RunRequest(find_experiment("digits"), ("adam",), epochs=1).specs()[0]
    ended = list(Jobs(tmp_path, CPU).work([broken, digits()], lambda event: None, Stop()))
    assert [each.state for each in ended] == ["failed", "finished"]
    assert ended[0].error.startswith(type(error).__name__)
    assert read_run(tmp_path / broken.key).problem == ended[0].error
    monkeypatch.setattr(torch.optim.Adam, "step", step)


def test_in_a_process_of_its_own_too(tmp_path):
    found = all_of([spec(0, does="quit"), spec(1)], tmp_path, jobs=2)
    assert found == {spec(0, does="quit").key: "failed", spec(1).key: "finished"}
    assert read_run(tmp_path / spec(0, does="quit").key).problem == "SystemExit: the step had enough"


# --- what is left


def test_checkpoints_of_a_finished_run_that_a_kill_left_are_removed(tmp_path):
    all_of([spec(0)], tmp_path)
    left = tmp_path / spec(0).key / "checkpoints"
    left.mkdir()
    (left / "00000001-0123456789abcdef.pt").write_bytes(b"left")
    assert all_of([spec(0)], tmp_path) == {spec(0).key: "skipped"}
    assert not left.exists()


# --- stopping


def test_a_stop_holds_for_those_entered_inside_it_and_for_no_other():
    with Stop() as outer, Stop() as inner:
        assert not inner.asked
        outer.ask()
        assert inner.asked
    with Stop() as inner, Stop() as later:
        later.ask()
        assert not inner.asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_all_nested_stops_once_and_the_second_aborts(number):
    before, told = signal.getsignal(number), []
    with Stop(lambda: told.append("asked")) as outer, Stop() as inner:
        os.kill(os.getpid(), number)
        assert (outer.signal, inner.asked, outer.urgent, told) == (number, True, False, ["asked"])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert outer.urgent
    assert signal.getsignal(number) == before


def test_a_run_begun_after_a_stop_was_asked_saves_itself_at_once(tmp_path: Path):
    from aida_lab.training.run import Interrupted

    with Stop() as stop:
        stop.ask()
        with pytest.raises(Interrupted):
            run(digits(), tmp_path, CPU)
