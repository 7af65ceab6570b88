"""Many runs at once, in real processes: each failure its own, nothing left running, nothing lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aida_lab.runs.store import RunFolder, read_run, read_sessions
from aida_lab.stopping import Stop
from aida_lab.training.options import Options
from aida_lab.workers import jobs as jobs_module
from aida_lab.workers.attempt import Outcome
from aida_lab.workers.jobs import Jobs
from aida_lab.workers.mps import Sharing
from aida_lab.workers.worker import read_request, request
from fake_runs import spec

CPU = Options(device="cpu")


class Told(list):
    """Events, kept."""

    def __call__(self, event) -> None:
        self.append(event)

    def about(self, run, *kinds):
        return [event for event in self if event.run == run.key and event.kind in kinds]


@pytest.fixture
def told():
    return Told()


def work(specs, out, jobs, told, options=CPU) -> dict[str, Outcome]:
    found = Jobs(out, options, jobs, "fake_runs:run").work(specs, told, Stop())
    return {outcome.key: outcome for outcome in found}


def processes(out: Path, specs) -> set[int]:
    return {session["process"] for run in specs for session in read_sessions(out / run.key)}


def is_running(process: int) -> bool:
    """Not counting one that ended and that its parent has yet to take note of."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(true, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


#: What runs do, and how they end.
ENDS = {
    "raise": "failed",
    "finish": "finished",
    "kill": "failed",
    "print": "finished",
    "diverge": "diverged",
    "exit": "failed",
    "warn": "finished",
    "dead-gpu": "failed",
    "busy": "busy",
    "crash": "failed",
    "again": "finished",
}
RUNS = {does: spec(seed, epochs=3, does=does) for seed, does in enumerate(ENDS)}


@dataclass
class Queue:
    """A queue that was worked off two at a time, in real processes."""

    out: Path
    told: Told
    outcomes: dict[str, Outcome]
    #: How many runs had been asked for, and had ended, when each outcome came.
    counts: list[tuple[int, int]]
    printed: str

    def outcome(self, does: str) -> Outcome:
        return self.outcomes[RUNS[does].key]

    def failure(self, does: str) -> dict[str, str]:
        return json.loads((self.out / RUNS[does].key / "failed.json").read_text())

    def sessions(self, does: str) -> list[dict]:
        return read_sessions(self.out / RUNS[does].key)


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    """One queue for many tests: a process that imports torch takes seconds to start."""
    out, told, outcomes, asked, counts = tmp_path_factory.mktemp("runs"), Told(), {}, [], []

    def specs():
        for run in (*RUNS.values(), RUNS["finish"]):
            asked.append(run)
            yield run

    with pytest.MonkeyPatch.context() as patch, RunFolder.open(out, RUNS["busy"]):
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setattr(jobs_module, "cores", lambda: 6)
        with (out / "printed").open("w+") as printed:
            before = os.dup(1)
            os.dup2(printed.fileno(), 1)
            try:
                for outcome in Jobs(out, CPU, 2, "fake_runs:run").work(specs(), told, Stop()):
                    outcomes[outcome.key] = outcome
                    counts.append((len(asked), len(outcomes)))
            finally:
                os.dup2(before, 1)
                os.close(before)
    return Queue(out, told, outcomes, counts, (out / "printed").read_text())


@pytest.mark.parametrize("does", ENDS)
def test_each_end_is_its_own(queue, does):
    assert queue.outcome(does).state == ENDS[does]
    assert queue.outcome(does).done == (ENDS[does] in ("finished", "diverged"))
    if does != "busy":
        assert read_run(queue.out / RUNS[does].key).state == ENDS[does]


def test_an_exception_ends_no_process(queue):
    error = f"ValueError: seed {RUNS['raise'].seed} was asked to fail"
    assert queue.outcome("raise").error == error
    assert queue.failure("raise")["error"] == error
    assert "in _run" in queue.failure("raise")["trace"]
    assert [event.text for event in queue.told.about(RUNS["raise"], "failed")] == [error]
    # it had another run, before or after
    (its,) = queue.sessions("raise")
    others = [each["process"] for does in ENDS if does not in ("raise", "busy") for each in queue.sessions(does)]
    assert its["process"] in others


def test_a_process_that_dies_says_how_and_what_it_said_last(queue):
    assert "was killed by SIGKILL (out of memory?)" in queue.outcome("kill").error
    assert queue.outcome("exit").error.endswith("ended with code 7; it said: the last words of the process")
    assert "was killed by SIGSEGV" in queue.outcome("crash").error
    assert "in _run" in queue.failure("crash")["trace"]  # where in Python it was
    assert [event.text for event in queue.told.about(RUNS["kill"], "failed")] == [queue.outcome("kill").error]


def test_a_process_whose_gpu_refuses_everything_gets_no_other_run(queue):
    assert queue.outcome("dead-gpu").error == "RuntimeError: CUDA error: device-side assert triggered"
    (its,) = queue.sessions("dead-gpu")
    others = [each["process"] for does in ("crash", "again") for each in queue.sessions(does)]
    assert its["process"] not in others


def test_no_process_is_left(queue):
    assert not any(is_running(each["process"]) for does in ENDS if does != "busy" for each in queue.sessions(does))


def test_what_is_printed_does_not_break_the_protocol(queue):
    assert queue.printed == ""
    assert len(queue.told.about(RUNS["print"], "epoch")) == 3


def test_runs_are_asked_for_only_when_there_is_room_and_one_asked_for_twice_is_one(queue):
    assert all(asked <= ended + 2 for asked, ended in queue.counts[:-1])
    assert len(queue.counts) == len(RUNS)
    assert len(queue.told.about(RUNS["finish"], "started")) == 1


def test_threads_are_shared_out_and_a_run_knows_that_it_is_not_alone(queue):
    assert {(each["threads"], each["omp"], each["at_once"]) for each in queue.sessions("finish")} == {(3, "3", 2)}


def test_a_run_that_another_process_has_is_left_to_it(queue):
    assert f"process {os.getpid()} " in queue.outcome("busy").error
    assert not (queue.out / RUNS["busy"].key / "failed.json").exists()


def test_what_the_lab_warns_of_is_a_note_of_the_run(queue):
    assert [event.text for event in queue.told.about(RUNS["warn"], "note")] == ["a checkpoint is damaged"]


def test_events_come_in_their_order_with_their_rows(queue):
    events = queue.told.about(RUNS["finish"], "started", "epoch", "finished")
    assert [(event.kind, event.epoch) for event in events] == [
        ("started", 0),
        ("epoch", 1),
        ("epoch", 2),
        ("epoch", 3),
        ("finished", 3),
    ]
    assert events[1].row["accuracy"] == 91.0
    assert events[-1].row["best"] == 93.0


def test_finished_runs_are_skipped_without_a_process(queue, told, monkeypatch):
    monkeypatch.setattr(jobs_module, "Orders", None)  # what starts one
    runs = [RUNS["finish"], RUNS["diverge"]]
    again = work(runs, queue.out, 2, told)
    assert {outcome.state for outcome in again.values()} == {"skipped"}
    assert all(outcome.done for outcome in again.values())
    assert [event.row["best"] for event in told.about(RUNS["finish"], "skipped")] == [93.0]
    assert len(queue.sessions("finish")) == 1


def test_in_this_process_all_is_the_same(tmp_path, told):
    here = {does: ENDS[does] for does in ("raise", "finish", "diverge", "warn", "busy", "again")}
    with RunFolder.open(tmp_path, RUNS["busy"]), pytest.warns(UserWarning, match="a library's warning"):
        found = work([RUNS[does] for does in here], tmp_path, 1, told)
    assert [outcome.state for outcome in found.values()] == list(here.values())
    assert read_run(tmp_path / RUNS["raise"].key).state == "failed"
    assert [event.text for event in told.about(RUNS["warn"], "note")] == ["a checkpoint is damaged"]
    assert processes(tmp_path, [RUNS["finish"], RUNS["again"]]) == {os.getpid()}


def test_when_the_gpu_refuses_this_process_another_goes_on(tmp_path, told, monkeypatch):
    answers = iter([True, False])
    monkeypatch.setattr(jobs_module, "gpu_is_usable", lambda: next(answers, False))
    found = work([RUNS["raise"], RUNS["finish"]], tmp_path, 1, told)
    assert [outcome.state for outcome in found.values()] == ["failed", "finished"]
    assert processes(tmp_path, [RUNS["raise"]]) == {os.getpid()}
    assert processes(tmp_path, [RUNS["finish"]]) != {os.getpid()}


def test_on_a_gpu_its_sharing_reaches_the_processes_and_the_user(tmp_path, told, monkeypatch):
    ended = []

    @contextmanager
    def shared():
        yield Sharing("CUDA MPS: started", {"OMP_NUM_THREADS": "5"})
        ended.append(True)

    monkeypatch.setattr(jobs_module, "shared_gpu", shared)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the user's own word, which nothing of ours replaces
    work([RUNS["finish"]], tmp_path, 2, told, Options(device="cuda"))
    (session,) = read_sessions(tmp_path / RUNS["finish"].key)
    assert (session["threads"], session["omp"]) == (None, "5")
    assert [event.text for event in told if event.run == ""] == ["CUDA MPS: started"]
    assert ended


@pytest.mark.parametrize("named", ["", "HERE"])
def test_the_folder_one_works_in_comes_last_where_modules_are_looked_for(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [named.replace("HERE", str(tmp_path)), "/of python", "/of packages"])
    assert jobs_module._module_path().split(os.pathsep) == ["/of python", "/of packages", str(tmp_path)]


def test_a_request_survives_its_way():
    options = Options("cuda:1", Path("/data"), None, 2, False, 1.5, 3, True)
    sent = json.loads(json.dumps(request(spec(3), Path("out"), options)))
    assert read_request(sent) == (spec(3), Path("out"), options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_gives_up(number):
    before, asked = signal.getsignal(number), []
    with Stop(lambda: asked.append(True)) as stop:
        assert not stop.asked
        signal.raise_signal(number)
        assert (stop.signal, stop.urgent, asked) == (number, False, [True])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert stop.urgent
    assert signal.getsignal(number) == before


# -- Ctrl-C, and a parent that is killed: a fork of ours that trains sleeping runs ---------------------------------

SLEEPING = [spec(seed, does="sleep") for seed in range(3)]


def train_sleeping(out: Path, jobs: int, told) -> None:
    """What the fork does: it says what happens, and ends as the command line would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Stop() as stop:
        told.send(("ready", ""))
        try:
            found = Jobs(out, CPU, jobs, "fake_runs:run").work(
                SLEEPING, lambda event: told.send((event.kind, event.run)), stop
            )
            for outcome in found:
                told.send(("outcome", outcome.state))
        except KeyboardInterrupt:
            told.send(("given up", ""))
    told.send(("end", ""))
    os._exit(128 + stop.signal)


class Parent:
    """The fork, once as many of its runs have begun as were waited for."""

    def __init__(self, out: Path, jobs: int, begun: int) -> None:
        forks = multiprocessing.get_context("fork")
        self._told, theirs = forks.Pipe(duplex=False)
        self.process = forks.Process(target=train_sleeping, args=(out, jobs, theirs))
        self.process.start()
        theirs.close()
        assert [self._told.recv()[0] for _ in range(1 + begun)] == ["ready"] + begun * ["started"]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def rest(self) -> list[tuple[str, str]]:
        """What it says until it ends."""
        said = []
        while not said or said[-1][0] != "end":
            assert self._told.poll(30)
            said.append(self._told.recv())
        self.process.join(30)
        return said


@pytest.fixture
def parent(tmp_path):
    started = []

    def start(jobs: int, begun: int) -> Parent:
        started.append(Parent(tmp_path, jobs, begun))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.join()


def saved(out: Path, run) -> bool:
    with RunFolder.open(out, run) as folder:
        return folder.load() == {"epoch": 0}


def test_ctrl_c_saves_all_runs_and_begins_no_other(parent, tmp_path):
    ours = parent(2, begun=2)
    theirs = processes(tmp_path, SLEEPING[:2])
    ours.signal(signal.SIGINT)
    assert ours.rest().count(("outcome", "interrupted")) == 2
    assert ours.process.exitcode == 130
    assert not any(map(is_running, theirs))
    assert all(saved(tmp_path, run) for run in SLEEPING[:2])
    assert not (tmp_path / SLEEPING[2].key).exists()


def test_ctrl_c_while_processes_start_is_no_failure(parent, tmp_path):
    ours = parent(2, begun=0)
    time.sleep(0.3)
    ours.signal(signal.SIGINT)
    assert ours.rest().count(("outcome", "interrupted")) == 2
    assert ours.process.exitcode == 130
    assert not list(tmp_path.glob("*/failed.json"))


def test_ctrl_c_in_this_process_saves_its_run_and_begins_no_other(parent, tmp_path):
    ours = parent(1, begun=1)
    ours.signal(signal.SIGINT)
    assert ours.rest()[-2:] == [("outcome", "interrupted"), ("end", "")]
    assert ours.process.exitcode == 130
    assert saved(tmp_path, SLEEPING[0])
    assert not (tmp_path / SLEEPING[1].key).exists()


def test_a_killed_parent_leaves_no_process_and_no_unsaved_run(parent, tmp_path):
    ours = parent(2, begun=2)
    theirs = processes(tmp_path, SLEEPING[:2])
    assert len(theirs) == 2
    ours.process.kill()
    until(lambda: not any(map(is_running, theirs)))
    assert all(saved(tmp_path, run) for run in SLEEPING[:2])


def test_the_second_ctrl_c_gives_up(parent, tmp_path):
    ours = parent(2, begun=2)
    theirs = processes(tmp_path, SLEEPING[:2])
    for each in theirs:
        os.kill(each, signal.SIGSTOP)  # cannot save
    ours.signal(signal.SIGINT)
    time.sleep(0.5)
    assert ours.process.is_alive()
    ours.signal(signal.SIGINT)
    assert ours.rest()[-2:] == [("given up", ""), ("end", "")]
    assert ours.process.exitcode == 130
    assert not any(map(is_running, theirs))
