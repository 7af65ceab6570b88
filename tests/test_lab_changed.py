"""What decides a run's numbers beside its spec: kept with the run, and noticed when it changes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from aida_lab.cli import app
from aida_lab.data import local, sets
from aida_lab.experiments import find_experiment
from aida_lab.external import import_optimizer, source_of
from aida_lab.request import RunRequest
from aida_lab.runs.files import StoreError
from aida_lab.runs.records import read_run, read_sessions, scan
from aida_lab.training import environment
from aida_lab.training import run as train
from aida_lab.training.environment import changes
from aida_lab.training.options import Options
from aida_lab.training.run import Interrupted, run

CPU = Options(device="cpu", threads=1)
QUICK = ("--epochs", "2", "--limit", "2", "--device", "cpu", "--set", "lr=0.01")

OWN = """
import torch, helper
from constants import RATE
from further import scale
from parts.inner import WIDTH
class Own(torch.optim.SGD):
    def step(self, closure=None):
        import later
        return super().step(closure)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder that has an optimizer of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.set_num_threads(1)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("rate = 1\n")
    (tmp_path / "further.py").write_text("def scale(): return 1\n")
    (tmp_path / "constants.py").write_text("RATE = 1\n")
    (tmp_path / "later.py").write_text("from parts import beside\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "inner.py").write_text("from .beside import DEPTH as WIDTH\n")
    (tmp_path / "parts" / "beside.py").write_text("DEPTH = 1\n")
    forget()
    yield tmp_path
    forget()


def forget():
    """As in a new process."""
    for name in ("own", "helper", "further", "constants", "later", "parts", "parts.inner", "parts.beside"):
        sys.modules.pop(name, None)
    source_of.cache_clear()


def call(*words):
    forget()
    return CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


def edit(path, text):
    path.write_text(path.read_text() + text)
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # an edit within one second is not seen by Python


# --- an optimizer of one's own


@pytest.mark.parametrize("file", ["own.py", "helper.py", "further.py", "constants.py"])
def test_an_edited_optimizer_is_trained_again_and_said_to_be(folder, file):
    assert call("train", "digits", "--optimizer", "own:Own", *QUICK).exit_code == 0
    (before,) = scan("runs")
    again = call("train", "digits", "--optimizer", "own:Own", *QUICK)
    assert "skipped" in again.output
    assert len(read_sessions(before.path)) == 1
    edit(folder / file, "x = 2\n")
    found = call("train", "digits", "--optimizer", "own:Own", *QUICK)
    assert found.exit_code == 0, found.output
    assert "own:Own was changed since (sha256 " in found.output
    assert f"trained again; the earlier files are in {before.path / 'before'}" in found.output
    (after,) = scan("runs")
    assert (after.path, after.state) == (before.path, "finished"), "the name is as before"
    first, second = (each["source"] for each in read_sessions(after.path))
    assert first != second
    assert "skipped" in call("train", "digits", "--optimizer", "own:Own", *QUICK).output


def test_what_was_trained_before_sources_were_kept_counts_as_it_is(folder):
    assert call("train", "digits", "--optimizer", "own:Own", *QUICK).exit_code == 0
    (record,) = scan("runs")
    env = record.path / "env.json"
    env.write_text(env.read_text().replace('"source"', '"earlier"'))
    edit(folder / "own.py", "x = 2\n")
    assert "skipped" in call("train", "digits", "--optimizer", "own:Own", *QUICK).output


def test_a_run_that_was_stopped_does_not_go_on_with_an_edited_optimizer(folder):
    forget()
    spec = RunRequest(find_experiment("digits"), ("own:Own",), {"lr": 0.01}, epochs=3).specs()[0]

    def stop(event):
        if event.kind == "epoch" and event.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(spec, folder / "runs", CPU, stop)
    edit(folder / "own.py", "x = 2\n")
    forget()
    heard = []
    run(spec, folder / "runs", CPU, heard.append)
    assert [event.text for event in heard if event.kind == "started"] == [""], "from its start"
    assert [row["epoch"] for row in train.RunFolder.open(folder / "runs", spec).rows()] == [1, 2, 3]


def test_a_search_measures_an_edited_optimizer_again(folder):
    pytest.importorskip("optuna")
    words = ("search", "digits", "--optimizer", "own:Own", "--over", "lr=0.1,0.01", "--seeds", "0", "--limit", "2")
    words += ("--epochs", "1", "--repeat-epochs", "1", "--device", "cpu")
    assert call(*words).exit_code == 0
    sessions = {record.path: len(read_sessions(record.path)) for record in scan("runs")}
    assert call(*words).exit_code == 0
    assert {record.path: len(read_sessions(record.path)) for record in scan("runs")} == sessions
    edit(folder / "own.py", "x = 2\n")
    assert call(*words).exit_code == 0
    assert {record.path: len(read_sessions(record.path)) for record in scan("runs")} == dict.fromkeys(sessions, 2)


@pytest.mark.parametrize("file", ["constants.py", "later.py", "parts/__init__.py", "parts/inner.py", "parts/beside.py"])
def test_the_source_covers_constants_packages_and_what_a_function_imports(folder, file):
    before = source_of("own:Own")
    edit(folder / file, "x = 2\n")
    forget()
    assert source_of("own:Own") != before


def test_a_files_imports_that_are_not_there_or_not_its_own_are_left_alone(folder):
    edit(folder / "own.py", "def rare():\n    import unknown.part, sklearn.nowhere\n    from .. import above\n")
    before = set(sys.modules)
    assert source_of("own:Own").startswith("sha256 ")
    assert not any(name.startswith("sklearn") for name in set(sys.modules) - before)


def test_the_source_of_an_installed_class_is_its_version():
    assert source_of("torch.optim:NAdam") == f"torch {torch.__version__.partition('+')[0]}"


@pytest.mark.parametrize("text", ["raise SystemExit(3)", "raise KeyError('x')", "def (", "1/0"])
def test_a_file_that_cannot_be_imported_is_one_line(folder, text):
    (folder / "own.py").write_text(text)
    found = call("train", "digits", "--optimizer", "own:Own", *QUICK)
    assert (found.exit_code, found.output.count("\n")) == (2, 1)
    assert "'own:Own' cannot be imported" in found.output


def test_a_file_where_one_works_takes_no_other_modules_place(folder, monkeypatch):
    (folder / "wave.py").write_text("raise RuntimeError('the user has a wave.py, too')")
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    import_optimizer("own:Own")
    import wave

    assert wave.__file__ != str(folder / "wave.py")


# --- data


def test_a_run_says_which_data_it_was_trained_on(folder):
    assert call("train", "digits", *QUICK).exit_code == 0
    (record,) = scan("runs")
    (session,) = read_sessions(record.path)
    assert session["data"]["digits"].startswith("md5 ")


def test_a_run_on_other_data_is_trained_again_and_one_on_data_that_is_not_there_is_not(folder, monkeypatch):
    assert call("train", "digits", *QUICK).exit_code == 0
    assert "skipped" in call("train", "digits", *QUICK).output
    monkeypatch.setattr(local, "_embedded_sum", lambda name: "other")
    assert "digits was changed since (md5 " in call("train", "digits", *QUICK).output
    assert "skipped" in call("train", "digits", *QUICK).output
    monkeypatch.setattr("aida_lab.training.environment.checksum", lambda data, root: None)
    assert "skipped" in call("train", "digits", *QUICK).output
    (record,) = scan("runs")
    assert len(read_sessions(record.path)) == 2


def test_a_checksum_tells_data_apart(tmp_path):
    data = sets.DataSet(
        "things", "Things", "", "things", (sets.DataFile("a", 3), sets.DataFile("b", 3)), derived=("c",)
    )
    assert local.checksum(data, tmp_path) is None
    (tmp_path / "things").mkdir()
    for name in "ab":
        (tmp_path / "things" / name).write_bytes(b"123")
    seen = {local.checksum(data, tmp_path)}
    shutil.copytree(tmp_path / "things", tmp_path / "copy" / "things")
    assert {local.checksum(data, tmp_path / "copy")} == seen, "wherever it lies"
    for name, content in (("a", b"124"), ("b", b"321"), ("c", b"made of them, by whatever version")):
        (tmp_path / "things" / name).write_bytes(content)
        seen.add(local.checksum(data, tmp_path))
    assert len(seen) == 3


def test_a_checksum_tells_image_folders_apart_by_their_names(tmp_path):
    data = replace(sets.IMAGENET_SAMPLE, tree=sets.ImageTree(1, {"train": 2, "val": 1}))
    seen = set()
    for copy, names in enumerate((["a.jpg", "b.jpg"], ["a.jpg", "c.jpg"], ["a.jpg", "b.jpg", "note.txt"])):
        for split in ("train", "val"):
            there = tmp_path / str(copy) / data.folder / split / "n01"
            there.mkdir(parents=True)
            for name in names:
                (there / name).touch()
        seen.add(local.checksum(data, tmp_path / str(copy)))
    assert len(seen) == 2


# --- going on elsewhere


def stopped(spec, out):
    def stop(event):
        if event.kind == "step" and event.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(spec, out, CPU, stop)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("torch", lambda now: {**now, "versions": {**now["versions"], "torch": "99.0"}}),
        ("code", lambda now: {**now, "git": "another commit"}),
        ("device", lambda now: {**now, "device": "another device"}),
    ],
)
def test_going_on_under_another_torch_code_or_device_is_kept_and_said(folder, monkeypatch, name, changed):
    spec = RunRequest(find_experiment("digits"), ("sgd",), epochs=2).specs()[0]
    monkeypatch.setattr(environment, "_commit", lambda: "this commit")
    stopped(spec, folder)
    describe = environment.describe
    monkeypatch.setattr(train, "describe", lambda *words: changed(describe(*words)))
    heard = []
    run(spec, folder, CPU, heard.append)
    first, second = read_sessions(folder / spec.key)
    assert "changed" not in first
    assert list(second["changed"]) == [name]
    (note,) = [event.text for event in heard if event.kind == "note"]
    assert note.startswith(f"resumed with other {name}: ")
    assert note.endswith(f"{second['changed'][name][1]} now; its numbers may differ")


def test_a_run_that_begins_anew_has_changed_nothing(folder, monkeypatch):
    spec = RunRequest(find_experiment("digits"), ("sgd",), epochs=1).specs()[0]
    with train.RunFolder.open(folder, spec) as begun:
        begun.begin_session({"git": "another commit"})
    run(spec, folder, CPU)
    assert "changed" not in read_sessions(folder / spec.key)[-1]


def test_threads_change_nothing_on_a_gpu_and_odd_sessions_break_nothing():
    now = {"device_type": "cuda", "threads": 2, "versions": {"torch": "2"}}
    assert changes({"threads": 1, "versions": "odd"}, now) == {}
    assert changes({"threads": 1}, {**now, "device_type": "cpu"}) == {"threads": (1, 2)}


# --- a checkpoint of another run


def test_a_checkpoint_of_another_seed_does_not_end_up_in_a_result(folder):
    specs = [RunRequest(find_experiment("digits"), ("sgd",), epochs=2, seeds=(seed,)).specs()[0] for seed in (0, 1)]
    for spec in specs:
        stopped(spec, folder)
    ours, theirs = (folder / spec.key / "checkpoints" for spec in specs)
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    with pytest.raises(StoreError, match=f"it belongs to run {specs[1].key}, and this is {specs[0].key}"):
        run(specs[0], folder, CPU)
    assert read_run(folder / specs[0].key).state == "stopped"
