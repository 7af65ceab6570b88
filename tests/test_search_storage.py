"""The storage of a search and the heartbeats of its workers, and what can go wrong with both."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import sqlalchemy
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from aida_lab.cli import app
from aida_lab.search.liveness import Heartbeat, is_dead, this_worker
from aida_lab.search.storage import Storage, StorageError, _secrets, sqlite_in
from aida_lab.search.trials import BEAT
from search_cases import complete, new_storage, once, plan, trials, until, worker

LR = {"lr": (1.0, 0.1, 0.01)}


@pytest.fixture
def address(tmp_path):
    return new_storage(tmp_path)


def test_a_storage_that_cannot_be_opened_is_named_without_its_password(tmp_path, monkeypatch):
    monkeypatch.setattr("aida_lab.search.storage._OPEN_TIMEOUT", 0.1)
    with pytest.raises(
        StorageError, match=r"postgresql\+psycopg://me:\*\*\*@127.0.0.1:9/db cannot be used: "
    ) as raised:
        Storage("postgresql://me:secret@127.0.0.1:9/db")
    assert "secret" not in str(raised.value)


INVALID = (
    "nowhere",
    "host=127.0.0.1 port=9 user=me password=s3cret dbname=db",
    "postgresql//me:s3cret@127.0.0.1:9/db",
    "postgresql:/me:s3cret@127.0.0.1:9/db",
    "postgresql:me:s3cret@127.0.0.1:9/db",
    "postgresql://me:s3cret",
    "postgresql://me:s3cret@127.0.0.1:port/db",
    "postgresql://me:s3cret@[::1/db",
    "postgresql:///me:s3cret@127.0.0.1:9/db",
    "postgresql://me/s3cret@127.0.0.1:9/db",
    "postgresql://me:a@s3cret@127.0.0.1:9/db",
    "postgresql://127.0.0.1:9/db?user=me&password=a@s3cret",
    "postgresql://me@127.0.0.1:9/db&password=s3cret",
    "postgresql://me@127.0.0.1:9/db;password=s3cret",
    "postgresql://me;password=s3cret@127.0.0.1:9/db",
    "postgresql://me@127.0.0.1:9/dbname=db password=s3cret",
)
#: Valid addresses without a server or without a driver.
UNREACHABLE = (
    "postgresql://me:s3cret@127.0.0.1:9/db",
    "postgresql://me:a/s3cret@127.0.0.1:9/db",
    "postgresql://me:a%40s3cret@127.0.0.1:9/db",
    "postgresql://127.0.0.1:9/db?user=me&password=s3cret",
    "postgresql://me@127.0.0.1:9/db?sslpassword=s3cret&sslmode=require",
    "postgresql+nothing://me:s3cret@127.0.0.1:9/db",
    "nothing://me:s3cret@127.0.0.1:9/db",
    "mysql://me:s3cret@127.0.0.1:9/db",
)


@pytest.mark.parametrize("address", INVALID + UNREACHABLE)
def test_no_password_is_printed_and_an_invalid_address_is_one_line(address, tmp_path, monkeypatch):
    monkeypatch.setattr("aida_lab.search.storage._OPEN_TIMEOUT", 0.1)
    words = ["search", "digits", "--device", "cpu", "--out", str(tmp_path), "--storage", address]
    found = CliRunner(env={"COLUMNS": "500"}).invoke(app, words)
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit), "not a traceback"
    lines = [line for line in found.output.splitlines() if "retrying" not in line]
    assert len(lines) == 1
    assert ("--storage is not a valid address" in lines[0]) == (address in INVALID)
    assert "s3cret" not in found.output


def test_a_traceback_shows_no_password(tmp_path):
    program = (
        "import aida_lab.cli, aida_lab.search.storage as storage\n"
        "def broken(address): raise RuntimeError('an internal error')\n"
        "storage._url = broken\n"
        "aida_lab.cli.main()\n"
    )
    words = ["search", "digits", "--device", "cpu", "--out", tmp_path, "--storage", "postgresql://me:s3cret@h/db"]
    # wide enough that no value is cut off
    found = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "500"},
    )  # fmt: skip
    assert "an internal error" in found.stderr
    assert "s3cret" not in found.stdout + found.stderr


def test_a_password_in_an_error_of_the_database_is_hidden(address):
    storage = Storage(address, timeout=0)
    storage._secrets = _secrets(sqlalchemy.make_url("postgresql://me:p%2Fq r@h/db?password=other"))

    def refused():
        raise OperationalError("", {}, sqlite3.OperationalError("no entry for p/q r, p%2Fq%20r, p%2Fq+r or other"))

    with pytest.raises(StorageError, match=r"no entry for \*\*\*, \*\*\*, \*\*\* or \*\*\*\. Nothing is lost"):
        storage.retry(refused)
    storage.close()


@pytest.mark.parametrize("name", ["a?b", "a%b", "a%20b", "a b", "a#b", "a{b}", "a+b", "a&b=c", "ä", "file:x?y"])
def test_the_storage_lies_in_the_run_folder_whatever_its_name(tmp_path, name):
    made = plan(over=LR)
    storage = sqlite_in(tmp_path / name / "runs")
    with worker([made], tmp_path / name / "runs", storage) as ours:
        ours.carry_out()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.db")] == [f"{name}/runs/search.db"]
    assert complete(trials(storage, made.name)) == once(made.space.grid())


def test_a_storage_that_stays_unavailable_raises_an_error_with_the_way_out(address):
    notes = []
    storage = Storage(address, timeout=0.3, note=notes.append)
    tries = []

    def locked():
        tries.append(1)
        raise sqlalchemy_error()

    with pytest.raises(StorageError, match=r"stopped responding: database is locked. Nothing is lost: .* same"):
        storage.retry(locked)
    assert len(tries) > 1
    assert len(notes) == 1
    assert "retrying for 0.3 s" in notes[0]
    storage.close()


def sqlalchemy_error():
    return OperationalError("UPDATE", {}, sqlite3.OperationalError("database is locked"))


@pytest.mark.parametrize("operation", ["create_new_trial", "set_trial_state_values", "set_trial_user_attr"])
def test_a_lost_reply_changes_nothing(tmp_path, address, monkeypatch, operation):
    made = plan(over=LR)
    monkeypatch.setattr("aida_lab.search.storage._PAUSE", 0.01)
    with worker([made], tmp_path, address) as ours:
        real, lost = getattr(ours.storage.rdb, operation), []

        def with_lost_reply(*args, **named):
            found = real(*args, **named)
            if len(lost) < 20 and len(lost) % 2 == 0:  # every other time
                lost.append(operation)
                raise sqlalchemy_error()
            lost.append("")
            return found

        monkeypatch.setattr(ours.storage.rdb, operation, with_lost_reply)
        ours.carry_out()
        assert ours.searches[0].findings().complete
    assert operation in lost
    assert complete(trials(address, made.name)) == once(made.space.grid())
    assert {trial.state for trial in trials(address)} == {TrialState.COMPLETE}


def test_a_lease_sends_heartbeats_while_the_storage_is_retried(tmp_path, address, monkeypatch):
    with worker([made := plan(over=LR)], tmp_path, address, timeout=0.3) as ours:
        real, made_by_us, beats = ours.storage.rdb.get_all_trials, [], []

        def fails_after_the_first_lease(*args, **named):
            found = real(*args, **named)
            if found and not made_by_us and "states" not in named:  # not the reads of heartbeats
                made_by_us.extend(found)
                raise sqlalchemy_error()
            return found

        def pause(seconds):
            until(lambda: trials(address, made.name)[0].user_attrs[BEAT] > 1, 10)
            beats.append(seconds)

        monkeypatch.setattr(ours.storage.rdb, "get_all_trials", fails_after_the_first_lease)
        monkeypatch.setattr("aida_lab.search.storage.time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
        ours.carry_out()
    assert len(beats) == 1
    assert complete(trials(address, made.name)) == once(made.space.grid())
    assert {trial.state for trial in trials(address)} == {TrialState.COMPLETE}


def test_no_process_writes_between_a_read_and_a_write(address):
    storage = Storage(address)
    with storage.rdb.engine.connect() as ours:
        ours.exec_driver_sql("SELECT 1")
        theirs = sqlite3.connect(address.removeprefix("sqlite:///"), timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            theirs.execute("BEGIN IMMEDIATE")
        theirs.close()
    storage.close()


class Beats:
    """A heartbeat with a fake clock and fake workers."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.last, self.sent = 0.0, {}, []
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.heartbeat = Heartbeat(lambda *beat: self.sent.append(beat), lambda: self.last, timeout=60)

    def tick(self, seconds=10.0, beats=None):
        self.now += seconds
        self.last = beats
        self.heartbeat.tick()
        return set(self.heartbeat.timed_out())


def test_a_worker_without_heartbeats_times_out(monkeypatch):
    beats = Beats(monkeypatch)
    beats.heartbeat.add(9)
    for number in range(7):
        assert beats.tick(beats={1: 5, 2: number, 9: 0}) == set()
    assert beats.tick(beats={1: 5, 2: 7, 9: 0}) == {1}  # not the trials of this worker
    assert beats.tick(beats={1: 6, 2: 8}) == set()
    assert beats.sent == [(9, number) for number in range(1, 10)]


def test_time_without_reads_does_not_count(monkeypatch):
    beats = Beats(monkeypatch)
    beats.tick(beats={1: 5})
    assert beats.tick(3600, beats={1: 5}) == set()  # this machine was suspended
    for _ in range(30):
        assert beats.tick(beats=None) == set()  # the storage was unavailable
    assert beats.tick(beats={1: 5}) == set()


def test_a_dead_process_of_this_system_is_detected_at_once():
    ours = dict(this_worker())
    assert not is_dead(ours)
    assert is_dead({**ours, "process": 2**22 + 1})
    assert is_dead({**ours, "born": "1"})  # its PID was reused
    assert not is_dead({**ours, "system": "another", "process": 2**22 + 1})
    assert not is_dead({})
