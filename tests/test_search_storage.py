"""What a search is kept in, and how it knows which workers are there: whatever may go wrong with either."""

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
from aida_lab.search.liveness import Watch, is_gone, this_worker
from aida_lab.search.storage import Storage, StorageError, _secrets, sqlite_in
from aida_lab.search.trials import BEAT
from search_cases import complete, new_storage, once, plan, trials, until, worker

LR = {"lr": (1.0, 0.1, 0.01)}


@pytest.fixture
def address(tmp_path):
    return new_storage(tmp_path)


def test_a_storage_that_cannot_be_opened_is_named_without_its_password(tmp_path, monkeypatch):
    monkeypatch.setattr("aida_lab.search.storage._AT_FIRST", 0.1)
    with pytest.raises(
        StorageError, match=r"postgresql\+psycopg://me:\*\*\*@127.0.0.1:9/db cannot be used: "
    ) as raised:
        Storage("postgresql://me:secret@127.0.0.1:9/db")
    assert "secret" not in str(raised.value)


NO_ADDRESSES = (
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
#: Addresses at which nobody answers, or for which there is no driver.
NOBODY_THERE = (
    "postgresql://me:s3cret@127.0.0.1:9/db",
    "postgresql://me:a/s3cret@127.0.0.1:9/db",
    "postgresql://me:a%40s3cret@127.0.0.1:9/db",
    "postgresql://127.0.0.1:9/db?user=me&password=s3cret",
    "postgresql://me@127.0.0.1:9/db?sslpassword=s3cret&sslmode=require",
    "postgresql+nothing://me:s3cret@127.0.0.1:9/db",
    "nothing://me:s3cret@127.0.0.1:9/db",
    "mysql://me:s3cret@127.0.0.1:9/db",
)


@pytest.mark.parametrize("address", NO_ADDRESSES + NOBODY_THERE)
def test_no_password_is_printed_and_an_address_that_is_none_is_one_line(address, tmp_path, monkeypatch):
    monkeypatch.setattr("aida_lab.search.storage._AT_FIRST", 0.1)
    words = ["search", "digits", "--device", "cpu", "--out", str(tmp_path), "--storage", address]
    found = CliRunner(env={"COLUMNS": "500"}).invoke(app, words)
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit), "not a traceback"
    said = [line for line in found.output.splitlines() if "trying again" not in line]
    assert len(said) == 1
    assert ("--storage is no address" in said[0]) == (address in NO_ADDRESSES)
    assert "s3cret" not in found.output


def test_a_traceback_shows_no_password(tmp_path):
    program = (
        "import aida_lab.cli, aida_lab.search.storage as storage\n"
        "def broken(address): raise RuntimeError('a fault of ours')\n"
        "storage._url = broken\n"
        "aida_lab.cli.main()\n"
    )
    words = ["search", "digits", "--device", "cpu", "--out", tmp_path, "--storage", "postgresql://me:s3cret@h/db"]
    # wide enough that no value would be cut off
    found = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "500"},
    )  # fmt: skip
    assert "a fault of ours" in found.stderr
    assert "s3cret" not in found.stdout + found.stderr


def test_a_password_that_the_database_repeats_is_not_repeated(address):
    storage = Storage(address, patience=0)
    storage._secrets = _secrets(sqlalchemy.make_url("postgresql://me:p%2Fq r@h/db?password=other"))

    def refused():
        raise OperationalError("", {}, sqlite3.OperationalError("no entry for p/q r, p%2Fq%20r, p%2Fq+r or other"))

    with pytest.raises(StorageError, match=r"no entry for \*\*\*, \*\*\*, \*\*\* or \*\*\*\. Nothing is lost"):
        storage.ask(refused)
    storage.close()


@pytest.mark.parametrize("name", ["a?b", "a%b", "a%20b", "a b", "a#b", "a{b}", "a+b", "a&b=c", "ä", "file:x?y"])
def test_a_search_is_kept_in_its_folder_whatever_that_is_called(tmp_path, name):
    made = plan(over=LR)
    storage = sqlite_in(tmp_path / name / "runs")
    with worker([made], tmp_path / name / "runs", storage) as ours:
        ours.carry_out()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.db")] == [f"{name}/runs/search.db"]
    assert complete(trials(storage, made.name)) == once(made.space.grid())


def test_a_storage_that_stays_away_is_given_up_with_the_way_out(address):
    noted = []
    storage = Storage(address, patience=0.3, note=noted.append)
    asked = []

    def locked():
        asked.append(1)
        raise sqlalchemy_error()

    with pytest.raises(StorageError, match=r"does not answer any more: database is locked. Nothing is lost: .* same"):
        storage.ask(locked)
    assert len(asked) > 1
    assert len(noted) == 1
    assert "trying again for 0.3 s" in noted[0]
    storage.close()


def sqlalchemy_error():
    return OperationalError("UPDATE", {}, sqlite3.OperationalError("database is locked"))


@pytest.mark.parametrize("operation", ["create_new_trial", "set_trial_state_values", "set_trial_user_attr"])
def test_an_answer_that_is_lost_changes_nothing(tmp_path, address, monkeypatch, operation):
    made = plan(over=LR)
    monkeypatch.setattr("aida_lab.search.storage._PAUSE", 0.01)
    with worker([made], tmp_path, address) as ours:
        real, lost = getattr(ours.storage.rdb, operation), []

        def carried_out_unheard(*args, **named):
            found = real(*args, **named)
            if len(lost) < 20 and len(lost) % 2 == 0:  # every other time
                lost.append(operation)
                raise sqlalchemy_error()
            lost.append("")
            return found

        monkeypatch.setattr(ours.storage.rdb, operation, carried_out_unheard)
        ours.carry_out()
        assert ours.searches[0].findings().complete
    assert operation in lost
    assert complete(trials(address, made.name)) == once(made.space.grid())
    assert {trial.state for trial in trials(address)} == {TrialState.COMPLETE}


def test_a_claim_is_beaten_for_while_the_storage_is_asked_again(tmp_path, address, monkeypatch):
    with worker([made := plan(over=LR)], tmp_path, address, grace=0.3) as ours:
        real, made_by_us, beats = ours.storage.rdb.get_all_trials, [], []

        def away_after_the_first_claim(*args, **named):
            found = real(*args, **named)
            if found and not made_by_us and "states" not in named:  # a look for beats is another matter
                made_by_us.extend(found)
                raise sqlalchemy_error()
            return found

        def pause(seconds):
            until(lambda: trials(address, made.name)[0].user_attrs[BEAT] > 1, 10)
            beats.append(seconds)

        monkeypatch.setattr(ours.storage.rdb, "get_all_trials", away_after_the_first_claim)
        monkeypatch.setattr("aida_lab.search.storage.time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
        ours.carry_out()
    assert len(beats) == 1
    assert complete(trials(address, made.name)) == once(made.space.grid())
    assert {trial.state for trial in trials(address)} == {TrialState.COMPLETE}


def test_nobody_writes_between_a_look_and_a_write(address):
    storage = Storage(address)
    with storage.rdb.engine.connect() as ours:
        ours.exec_driver_sql("SELECT 1")
        theirs = sqlite3.connect(address.removeprefix("sqlite:///"), timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            theirs.execute("BEGIN IMMEDIATE")
        theirs.close()
    storage.close()


class Beats:
    """Workers of which something is heard, or nothing."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.last, self.sent = 0.0, {}, []
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.watch = Watch(lambda trial, number: self.sent.append((trial, number)), lambda: self.last, grace=60)

    def turn(self, seconds=10.0, beats=None):
        self.now += seconds
        self.last = beats
        self.watch.turn()
        return set(self.watch.silent())


def test_a_worker_that_is_not_heard_of_is_given_up_after_the_grace(monkeypatch):
    beats = Beats(monkeypatch)
    beats.watch.hold(9)
    for number in range(7):
        assert beats.turn(beats={1: 5, 2: number, 9: 0}) == set()
    assert beats.turn(beats={1: 5, 2: 7, 9: 0}) == {1}  # not those that are our own
    assert beats.turn(beats={1: 6, 2: 8}) == set()
    assert beats.sent == [(9, number) for number in range(1, 10)]


def test_time_in_which_nobody_listened_does_not_count(monkeypatch):
    beats = Beats(monkeypatch)
    beats.turn(beats={1: 5})
    assert beats.turn(3600, beats={1: 5}) == set()  # we were asleep
    for _ in range(30):
        assert beats.turn(beats=None) == set()  # the storage was away
    assert beats.turn(beats={1: 5}) == set()


def test_a_dead_process_of_this_system_is_known_at_once():
    ours = dict(this_worker())
    assert not is_gone(ours)
    assert is_gone({**ours, "process": 2**22 + 1})
    assert is_gone({**ours, "born": "1"})  # its number is another's now
    assert not is_gone({**ours, "system": "another", "process": 2**22 + 1})
    assert not is_gone({})
