"""Many runs at once in real processes: failures stay separate, no process is left, no run is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from aida_lab.events import Pruned
from aida_lab.runs.records import read_run, read_sessions
from aida_lab.runs.store import RunFolder
from aida_lab.stopping import Stop
from aida_lab.training.options import Options
from aida_lab.workers import jobs as jobs_module
from aida_lab.workers.attempt import Outcome
from aida_lab.workers.jobs import Jobs
from aida_lab.workers.mps import Sharing
from fake_runs import spec

CPU = Options(device="cpu")
QUEUE_OPTIONS = Options("cpu", Path("/data"), None, 2, False, 1.5)


class Events(list):
    """A listener that keeps all events."""

    def __call__(self, event) -> None:
        self.append(event)

    def of(self, run, *kinds):
        return [event for event in self if event.run == run.key and event.kind in kinds]


@pytest.fixture
def events():
    return Events()


def work(specs, out, jobs, events, options=CPU) -> dict[str, Outcome]:
    found = Jobs(out, options, jobs, "fake_runs:run").work(specs, events, Stop())
    return {outcome.key: outcome for outcome in found}


def processes(out: Path, specs) -> set[int]:
    return {session["process"] for run in specs for session in read_sessions(out / run.key)}


def is_running(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(true, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


#: What each run does, and its expected state.
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
    """The results of a queue that ran two at a time in real processes."""

    out: Path
    events: Events
    outcomes: dict[str, Outcome]
    #: Number of runs taken from the queue and ended at the time of each outcome.
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
    """One queue for many tests, because a process that imports torch takes seconds to start."""
    out, events, outcomes, taken, counts = tmp_path_factory.mktemp("runs"), Events(), {}, [], []

    def specs():
        for run in (*RUNS.values(), RUNS["finish"]):
            taken.append(run)
            yield run

    with pytest.MonkeyPatch.context() as patch, RunFolder.open(out, RUNS["busy"]):
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setattr(jobs_module, "cores", lambda: 6)
        with (out / "printed").open("w+") as printed:
            before = os.dup(1)
            os.dup2(printed.fileno(), 1)
            try:
                for outcome in Jobs(out, QUEUE_OPTIONS, 2, "fake_runs:run").work(specs(), events, Stop()):
                    outcomes[outcome.key] = outcome
                    counts.append((len(taken), len(outcomes)))
            finally:
                os.dup2(before, 1)
                os.close(before)
    return Queue(out, events, outcomes, counts, (out / "printed").read_text())


@pytest.mark.parametrize("does", ENDS)
def test_each_run_gets_its_own_outcome(queue, does):
    assert queue.outcome(does).state == ENDS[does]
    assert queue.outcome(does).done == (ENDS[does] in ("finished", "diverged"))
    if does != "busy":
        assert read_run(queue.out / RUNS[does].key).state == ENDS[does]


def test_an_exception_does_not_end_the_worker(queue):
    error = f"ValueError: seed {RUNS['raise'].seed} was asked to fail"
    assert queue.outcome("raise").error == error
    assert queue.failure("raise")["error"] == error
    assert "in _run" in queue.failure("raise")["trace"]
    assert [event.text for event in queue.events.of(RUNS["raise"], "failed")] == [error]
    # the same worker trained another run
    (its,) = queue.sessions("raise")
    others = [each["process"] for does in ENDS if does not in ("raise", "busy") for each in queue.sessions(does)]
    assert its["process"] in others


def test_the_outcome_of_a_dead_worker_names_the_cause_and_its_last_output(queue):
    assert "was killed by SIGKILL (out of memory?)" in queue.outcome("kill").error
    assert queue.outcome("exit").error.endswith("ended with code 7; its last output: the last words of the process")
    assert "was killed by SIGSEGV" in queue.outcome("crash").error
    assert "in _run" in queue.failure("crash")["trace"]  # the Python stack
    assert [event.text for event in queue.events.of(RUNS["kill"], "failed")] == [queue.outcome("kill").error]


def test_a_worker_with_an_unusable_gpu_gets_no_other_run(queue):
    assert queue.outcome("dead-gpu").error == "RuntimeError: CUDA error: device-side assert triggered"
    (its,) = queue.sessions("dead-gpu")
    others = [each["process"] for does in ("crash", "again") for each in queue.sessions(does)]
    assert its["process"] not in others


def test_no_process_is_left(queue):
    assert not any(is_running(each["process"]) for does in ENDS if does != "busy" for each in queue.sessions(does))


def test_printed_output_does_not_mix_with_messages(queue):
    assert queue.printed == ""
    assert len(queue.events.of(RUNS["print"], "epoch")) == 3


def test_runs_are_taken_only_when_a_worker_is_free_and_duplicates_are_trained_once(queue):
    assert all(taken <= ended + 2 for taken, ended in queue.counts[:-1])
    assert len(queue.counts) == len(RUNS)
    assert len(queue.events.of(RUNS["finish"], "started")) == 1


def test_threads_are_divided_among_workers_and_runs_record_the_number_at_once(queue):
    assert {(each["threads"], each["omp"], each["at_once"]) for each in queue.sessions("finish")} == {(3, "3", 2)}


def test_a_run_locked_by_another_process_is_busy_and_not_failed(queue):
    assert f"process {os.getpid()} " in queue.outcome("busy").error
    assert not (queue.out / RUNS["busy"].key / "failed.json").exists()


def test_warnings_of_the_lab_become_notes_of_the_run(queue):
    assert [event.text for event in queue.events.of(RUNS["warn"], "note")] == ["a checkpoint is damaged"]


def test_events_arrive_in_order_with_their_rows(queue):
    events = queue.events.of(RUNS["finish"], "started", "epoch", "finished")
    assert [(event.kind, event.epoch) for event in events] == [
        ("started", 0),
        ("epoch", 1),
        ("epoch", 2),
        ("epoch", 3),
        ("finished", 3),
    ]
    assert events[1].row["accuracy"] == 91.0
    assert events[-1].row["best"] == 93.0


def test_finished_runs_are_skipped_without_a_process(queue, events, monkeypatch):
    monkeypatch.setattr(jobs_module, "WorkerConfig", None)  # starting a worker would fail
    runs = [RUNS["finish"], RUNS["diverge"]]
    again = work(runs, queue.out, 2, events)
    assert {outcome.state for outcome in again.values()} == {"skipped"}
    assert all(outcome.done for outcome in again.values())
    assert [event.row["best"] for event in events.of(RUNS["finish"], "skipped")] == [93.0]
    assert len(queue.sessions("finish")) == 1


def test_outcomes_are_the_same_in_this_process(tmp_path, events):
    here = {does: ENDS[does] for does in ("raise", "finish", "diverge", "warn", "busy", "again")}
    with RunFolder.open(tmp_path, RUNS["busy"]), pytest.warns(UserWarning, match="a library's warning"):
        found = work([RUNS[does] for does in here], tmp_path, 1, events)
    assert [outcome.state for outcome in found.values()] == list(here.values())
    assert read_run(tmp_path / RUNS["raise"].key).state == "failed"
    assert [event.text for event in events.of(RUNS["warn"], "note")] == ["a checkpoint is damaged"]
    assert processes(tmp_path, [RUNS["finish"], RUNS["again"]]) == {os.getpid()}


def test_when_the_gpu_is_unusable_here_a_worker_continues(tmp_path, events, monkeypatch):
    answers = iter([True, False])
    monkeypatch.setattr(jobs_module, "gpu_is_usable", lambda: next(answers, False))
    found = work([RUNS["raise"], RUNS["finish"]], tmp_path, 1, events)
    assert [outcome.state for outcome in found.values()] == ["failed", "finished"]
    assert processes(tmp_path, [RUNS["raise"]]) == {os.getpid()}
    assert processes(tmp_path, [RUNS["finish"]]) != {os.getpid()}


def test_gpu_sharing_reaches_the_workers_and_the_user(tmp_path, events, monkeypatch):
    ended = []

    @contextmanager
    def shared():
        yield Sharing("CUDA MPS: started", {"OMP_NUM_THREADS": "5"})
        ended.append(True)

    monkeypatch.setattr(jobs_module, "shared_gpu", shared)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # set by the user, so it is not replaced
    work([RUNS["finish"]], tmp_path, 2, events, Options(device="cuda"))
    (session,) = read_sessions(tmp_path / RUNS["finish"].key)
    assert (session["threads"], session["omp"]) == (None, "5")
    assert [event.text for event in events if event.run == ""] == ["CUDA MPS: started"]
    assert ended


@pytest.mark.parametrize("named", ["", "HERE"])
def test_the_working_directory_comes_last_on_the_module_path(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [named.replace("HERE", str(tmp_path)), "/of python", "/of packages"])
    assert jobs_module._module_path().split(os.pathsep) == ["/of python", "/of packages", str(tmp_path)]


def test_a_worker_gets_all_options(queue):
    (its,) = queue.sessions("finish")
    assert its["options"] == repr(replace(QUEUE_OPTIONS, threads=3, at_once=2))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_listener_prunes_a_run(tmp_path, jobs):
    pruned, other = spec(0, epochs=200, does="save"), spec(1)

    def listen(event):
        if event.run == pruned.key and event.kind == "epoch":
            raise Pruned

    found = work([pruned, other], tmp_path, jobs, listen)
    assert [found[each.key].state for each in (pruned, other)] == ["pruned", "finished"]
    record = read_run(tmp_path / pruned.key)
    assert record.state == "stopped"
    assert 1 <= record.rows < 200
    assert not (tmp_path / pruned.key / "checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_second_aborts(number):
    before, asked = signal.getsignal(number), []
    with Stop(lambda: asked.append(True)) as stop:
        assert not stop.asked
        signal.raise_signal(number)
        assert (stop.signal, stop.urgent, asked) == (number, False, [True])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert stop.urgent
    assert signal.getsignal(number) == before


# -- Ctrl-C and a killed parent: a forked process trains sleeping runs ---------------------------------------------

SLEEPING = [spec(seed, does="sleep") for seed in range(3)]


def train_sleeping(out: Path, jobs: int, pipe) -> None:
    """Train in the fork, send what happens to the pipe and exit like the command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Stop() as stop:
        pipe.send(("ready", ""))
        try:
            found = Jobs(out, CPU, jobs, "fake_runs:run").work(
                SLEEPING, lambda event: pipe.send((event.kind, event.run)), stop
            )
            for outcome in found:
                pipe.send(("outcome", outcome.state))
        except KeyboardInterrupt:
            pipe.send(("aborted", ""))
    pipe.send(("end", ""))
    os._exit(128 + stop.signal)


class Parent:
    """The forked process, after ``begun`` of its runs have started."""

    def __init__(self, out: Path, jobs: int, begun: int) -> None:
        forks = multiprocessing.get_context("fork")
        self._pipe, theirs = forks.Pipe(duplex=False)
        self.process = forks.Process(target=train_sleeping, args=(out, jobs, theirs))
        self.process.start()
        theirs.close()
        assert [self._pipe.recv()[0] for _ in range(1 + begun)] == ["ready"] + begun * ["started"]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def rest(self) -> list[tuple[str, str]]:
        """All messages until it ends."""
        messages = []
        while not messages or messages[-1][0] != "end":
            assert self._pipe.poll(30)
            messages.append(self._pipe.recv())
        self.process.join(30)
        return messages


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


def test_ctrl_c_saves_all_runs_and_starts_no_other(parent, tmp_path):
    ours = parent(2, begun=2)
    theirs = processes(tmp_path, SLEEPING[:2])
    ours.signal(signal.SIGINT)
    assert ours.rest().count(("outcome", "interrupted")) == 2
    assert ours.process.exitcode == 130
    assert not any(map(is_running, theirs))
    assert all(saved(tmp_path, run) for run in SLEEPING[:2])
    assert not (tmp_path / SLEEPING[2].key).exists()


def test_ctrl_c_while_workers_start_is_no_failure(parent, tmp_path):
    ours = parent(2, begun=0)
    time.sleep(0.3)
    ours.signal(signal.SIGINT)
    assert ours.rest().count(("outcome", "interrupted")) == 2
    assert ours.process.exitcode == 130
    assert not list(tmp_path.glob("*/failed.json"))


def test_ctrl_c_in_this_process_saves_its_run_and_starts_no_other(parent, tmp_path):
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


def test_the_second_ctrl_c_aborts(parent, tmp_path):
    ours = parent(2, begun=2)
    theirs = processes(tmp_path, SLEEPING[:2])
    for each in theirs:
        os.kill(each, signal.SIGSTOP)  # so that they cannot save
    ours.signal(signal.SIGINT)
    time.sleep(0.5)
    assert ours.process.is_alive()
    ours.signal(signal.SIGINT)
    assert ours.rest()[-2:] == [("aborted", ""), ("end", "")]
    assert ours.process.exitcode == 130
    assert not any(map(is_running, theirs))
