"""Several workers on one search that are killed or stopped, and a PostgreSQL server that restarts."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from optuna.trial import TrialState
from sqlalchemy import event

import postgres
from aida_lab.runs.records import read_run, read_sessions
from aida_lab.search.plan import Plan
from aida_lab.search.storage import Storage, StorageError, sqlite_in
from aida_lab.search.trials import ENDED, RUN, WITHDRAWN, WORKER
from aida_lab.training.options import Options
from aida_lab.training.run import run
from search_cases import PROCESSES, Worker, complete, ends_well, once, plan, rows, started, trials, until

LR = (0.2, 0.1, 0.05)


@pytest.fixture(scope="module")
def server():
    with postgres.server() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request, tmp_path):
    """The address of an empty storage."""
    if request.param == "sqlite":
        return sqlite_in(tmp_path)
    return request.getfixturevalue("server").database(tmp_path.name)


def words(out: Path, address: str, epochs: int = 12) -> list[str]:
    """Arguments of a search on digits that trains for some seconds and saves after every epoch."""
    searched = ["digits", "--optimizer", "sgd", "--over", f"lr={','.join(map(str, LR))}", "--seeds", "0,1"]
    length = ["--epochs", str(epochs), "--repeat-epochs", str(epochs), "--limit", "8", "--checkpoint-seconds", "0"]
    return [*searched, *length, "--device", "cpu", "--out", str(out), "--storage", address]


def planned(epochs: int = 12) -> Plan:
    return plan(over={"lr": LR}, epochs=epochs, limit=8)


def check_all_is_measured_once(address: str, made: Plan) -> None:
    assert complete(trials(address, made.name)) == once(made.space.grid())
    values = {trial.params["lr"]: trial.value for trial in trials(address, made.name) if trial.value is not None}
    best = max(LR, key=values.__getitem__)  # the first one on ties
    repeated = made.repetitions_name(made.spec({"lr": best}))
    assert complete(trials(address, repeated)) == once([{"seed": 0}, {"seed": 1}])
    assert not [trial for trial in trials(address) if trial.state == TrialState.RUNNING]


def running(address: str) -> list:
    return [trial for trial in trials(address) if trial.state == TrialState.RUNNING]


def test_the_run_of_a_killed_worker_is_resumed(tmp_path):
    out, address, made = tmp_path / "runs", sqlite_in(tmp_path / "runs"), planned()
    with started(words(out, address), tmp_path / "first") as first:
        until(lambda: rows(out) >= 3)
        os.kill(first.pid, signal.SIGSTOP)  # so that it is killed during a run on any machine
        (its,) = running(address)
        with started(words(out, address), tmp_path / "second") as second:
            until(lambda: complete(trials(address, made.name)))
            (still,) = [trial for trial in running(address) if trial.number == its.number]
            assert still.user_attrs[WORKER]["process"] == first.pid  # no heartbeat, but alive
            first.kill()
            ends_well(second, tmp_path / "second")
    check_all_is_measured_once(address, made)
    (left,) = [trial for trial in trials(address, made.name) if trial.state == TrialState.FAIL]
    assert left.number == its.number
    assert left.user_attrs[ENDED] == "its worker was not heard of any more"
    key = its.user_attrs[RUN]
    assert len(read_sessions(out / key)) == 2
    # the result is the same as without the kill
    torch.set_num_threads(1)
    whole = run(made.spec(its.params), tmp_path / "whole", Options(device="cpu"))
    assert json.loads((out / key / "result.json").read_text()) == dict(whole)
    assert read_run(out / key).rows == 12


def test_ctrl_c_releases_runs_at_once(tmp_path):
    out, address, made = tmp_path / "runs", sqlite_in(tmp_path / "runs"), planned()
    with started(words(out, address), tmp_path / "first") as first:
        until(lambda: rows(out) >= 3)
        os.kill(first.pid, signal.SIGINT)
        first.join(30)
        said = (tmp_path / "first").read_text()
        assert first.exitcode == 130, said
    assert "stopping: runs are saved first" in said or "interrupted" in said
    assert not running(address)
    (left,) = [trial for trial in trials(address) if trial.state == TrialState.FAIL]
    assert read_run(out / left.user_attrs[RUN]).state == "stopped"
    began = time.monotonic()
    with started(words(out, address), tmp_path / "second") as second:
        ends_well(second, tmp_path / "second")
    assert time.monotonic() - began < 60  # the timeout of a worker without heartbeats
    check_all_is_measured_once(address, made)
    assert len(read_sessions(out / left.user_attrs[RUN])) == 2


def test_machines_share_a_search_on_postgresql_and_one_dies(tmp_path, server):
    address, made = server.database(tmp_path.name), planned()
    one, two = tmp_path / "one", tmp_path / "two"
    # at the same time: both find the database empty and create its tables
    with (
        started([*words(one, address), "--grace", "3"], tmp_path / "first", system="one") as first,
        started([*words(two, address), "--grace", "3"], tmp_path / "second", system="two") as second,
    ):
        until(lambda: rows(one) >= 2)
        os.kill(first.pid, signal.SIGSTOP)  # so that it is killed during a run, however late the second one starts
        until(lambda: rows(two) >= 2)
        first.kill()
        ends_well(second, tmp_path / "second")
    check_all_is_measured_once(address, made)
    (left,) = [trial for trial in trials(address) if ENDED in trial.user_attrs]
    assert left.user_attrs[WORKER]["host"] == "one"
    assert read_run(one / left.user_attrs[RUN]).state == "stopped"
    assert read_run(two / left.user_attrs[RUN]).state == "finished"
    (path,) = (two / "search").glob("*.json")
    assert json.loads(path.read_text())["complete"]


def test_a_search_survives_a_restart_of_postgresql(tmp_path, server):
    address, made = server.database(tmp_path.name), planned()
    one, two = tmp_path / "one", tmp_path / "two"
    logs = [tmp_path / "first", tmp_path / "second"]
    with (
        started([*words(one, address), "--grace", "3"], logs[0], system="one") as first,
        started([*words(two, address), "--grace", "3"], logs[1], system="two") as second,
    ):
        until(lambda: complete(trials(address, made.name)))
        server.stop()
        time.sleep(4)  # longer than the timeout, but no worker counts as dead
        server.start()
        said = [ends_well(process, log) for process, log in zip((first, second), logs, strict=True)]
    check_all_is_measured_once(address, made)
    assert any("retrying for 120 s" in each for each in said)
    assert not [trial for trial in trials(address) if ENDED in trial.user_attrs]


def test_a_server_that_stays_down_raises_an_error_with_the_way_out(tmp_path, server):
    storage = Storage(server.database(tmp_path.name), timeout=1)
    server.stop()
    try:
        with pytest.raises(StorageError, match="Nothing is lost: trained runs are saved; run the same command"):
            storage.retry(storage.rdb.get_all_studies)
    finally:
        server.start()
    assert storage.retry(storage.rdb.get_all_studies) == []
    storage.close()


CONFIGURATIONS = 12


def work_and_die(address: str, out: Path, seed: int) -> None:
    """A worker without training, killed before a random SQL statement unless the seed is 0."""
    worker = Worker([crowded()], out, address)
    left = random.Random(seed).randrange(1, 200)  # a lease and a result take about fifty

    def count_down(*_: object) -> None:
        nonlocal left
        left -= 1
        if seed and not left:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(worker.storage.rdb.engine, "before_cursor_execute", count_down)
    worker.carry_out()
    worker.close()


def crowded() -> Plan:
    return plan(over={"lr": tuple(0.01 * number for number in range(1, CONFIGURATIONS + 1))}, seeds=(0,))


def test_workers_that_die_anywhere_lose_and_duplicate_nothing(address, tmp_path):
    made, out = crowded(), tmp_path / "runs"
    crowd: list[BaseProcess] = []
    for seed in (1, 2, 3, 4, 0):
        crowd.append(PROCESSES.Process(target=work_and_die, args=(address, out, seed)))
        crowd[-1].start()
    try:
        for each in crowd:
            each.join(90)
    finally:
        for each in crowd:
            each.kill()
            each.join()
    assert crowd[-1].exitcode == 0
    assert -signal.SIGKILL in [each.exitcode for each in crowd]
    assert complete(trials(address, made.name)) == once(made.space.grid())
    # The last to die may have left a superseded lease: the next worker ends it and measures nothing.
    work_and_die(address, out, 0)
    found = trials(address, made.name)
    assert complete(found) == once(made.space.grid())
    assert {trial.state for trial in found} <= {TrialState.COMPLETE, TrialState.FAIL}
    for trial in found:
        if trial.state == TrialState.FAIL:
            assert WITHDRAWN in trial.user_attrs or ENDED in trial.user_attrs
