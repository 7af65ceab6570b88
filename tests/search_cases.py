"""Helpers for the tests of searches: runs without training, workers in processes, contents of a storage."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState

from aida_lab.events import Event
from aida_lab.experiments import find_experiment
from aida_lab.request import RunRequest
from aida_lab.runs.store import RunFolder
from aida_lab.search import liveness
from aida_lab.search.loop import Search, SearchLoop
from aida_lab.search.plan import Plan, plan_of
from aida_lab.search.space import as_text
from aida_lab.search.storage import Storage, sqlite_in
from aida_lab.search.trials import CONFIGURATION, Studies
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.training.options import Options
from aida_lab.workers.jobs import Jobs
from store_cases import PROCESSES

#: Modules that are imported once for all worker processes.
PROCESSES.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "sklearn.datasets",
        "psycopg",
        "sqlalchemy.dialects.postgresql.psycopg",
        "sqlalchemy.dialects.sqlite.pysqlite",
        "optuna.storages._rdb.models",
        "alembic.command",
        "aida_lab.cli",
        "aida_lab.progress.display",
        "aida_lab.tasks.classification",
        __name__,
    ]
)

DIGITS = find_experiment("digits")


def new_storage(folder: Path) -> str:
    """Create an SQLite storage without studies and return its address."""
    (folder / "search.db").write_bytes(_empty())
    return sqlite_in(folder)


@cache
def _empty() -> bytes:
    """Cached, because creating the tables takes most of a second."""
    with tempfile.TemporaryDirectory() as folder:
        Storage(sqlite_in(Path(folder))).close()
        return (Path(folder) / "search.db").read_bytes()


def plan(optimizer: str = "sgd", over: dict[str, tuple[Any, ...]] | None = None, epochs: int = 2, **rest: Any) -> Plan:
    """A search on digits."""
    request = RunRequest(DIGITS, given=rest.pop("given", {}), epochs=epochs, limit=rest.pop("limit", None))
    return plan_of(request, optimizer, over, **{"repeat_epochs": epochs, "seeds": (0, 1), **rest})


def run(spec: RunSpec, out: Path, options: Options, listen: Callable[[Event], None]) -> dict[str, Any]:
    """A run without training: lr 0.1 is best, 2 fails, more than 2 diverges; 0.3 diverges after two epochs."""
    lr = spec.hyper["lr"]
    with RunFolder.open(out, spec) as folder:
        if folder.result is not None:
            listen(Event("skipped", spec.key, spec.epochs, spec.epochs, row=folder.result))
            return folder.result
        folder.begin_session({"process": os.getpid()})
        folder.load()
        listen(Event("started", spec.key, 0, spec.epochs))
        if lr == 2:
            raise ValueError("lr 2 fails")
        rows = []
        for epoch in range(1, spec.epochs + 1):
            accuracy = 90 - 5 * abs(math.log10(lr) + 1) + epoch / spec.epochs + spec.seed / 10
            rows.append({"epoch": epoch, "step": epoch, "lr": lr, "loss": 0.1, "accuracy": accuracy, "seconds": 0.1})
            folder.append_row(rows[-1])
            if epoch == 1 and spec.epochs > 2:
                folder.save({"epoch": epoch}, epoch)
            listen(Event("epoch", spec.key, epoch, spec.epochs, row=rows[-1]))
        last = rows[-1]["accuracy"]
        state = "diverged" if lr > 2 or (lr == 0.3 and spec.epochs > 2) else "finished"
        found = {"metric": "accuracy", "better": "higher", "best": last, "best_epoch": spec.epochs, "last": last}
        result = {"state": state, **found, "epochs": spec.epochs}
        folder.finish(result)
        listen(Event("finished", spec.key, spec.epochs, spec.epochs, row=result))
        return result


def interrupted_again(*_: object) -> dict[str, Any]:
    """A run that gets a second Ctrl-C while it saves."""
    raise KeyboardInterrupt


class Worker:
    """A worker on some searches in this process, without training."""

    def __init__(self, plans: Sequence[Plan], out: Path, address: str, timeout: float = 60.0) -> None:
        self.events: list[Event] = []
        self.listen: Callable[[Event], object] = self.events.append
        self.expected: list[RunSpec] = []
        self.stop = Stop()
        self.storage = Storage(address)
        self.studies = Studies(self.storage, timeout)
        self.searches = [Search(each, self.studies) for each in plans]
        self._out = out

    def carry_out(self, runner: str = "search_cases:run", jobs: int = 1) -> None:
        queue = Jobs(self._out, Options(device="cpu"), jobs, runner)
        with pytest.MonkeyPatch.context() as patch:
            # nothing was trained, so there is nothing to free, and gc.collect() takes half a second
            patch.setattr("aida_lab.workers.attempt._clean_up", lambda: None)
            SearchLoop(self.searches, queue, self.listen, self.expected.extend, self.stop).run()

    def close(self) -> None:
        self.studies.close()
        self.storage.close()


@contextmanager
def worker(plans: Sequence[Plan], out: Path, address: str, timeout: float = 60.0) -> Iterator[Worker]:
    made = Worker(plans, out, address, timeout)
    try:
        yield made
    finally:
        made.close()


def trials(address: str, study: str | None = None) -> list[FrozenTrial]:
    """The trials of one study, or of all studies."""
    rdb = _opened(address).rdb
    studies = [each for each in rdb.get_all_studies() if study in (None, each.study_name)]
    return [trial for each in studies for trial in rdb.get_all_trials(each._study_id)]


@cache
def _opened(address: str) -> Storage:
    """Cached, because tests poll it."""
    return Storage(address)


def complete(found: Sequence[FrozenTrial]) -> Counter[str]:
    """Count how often each configuration was measured."""
    done = [trial for trial in found if trial.state == TrialState.COMPLETE]
    return Counter(as_text(trial.user_attrs[CONFIGURATION]) for trial in done)


def once(configurations: Sequence[dict[str, Any]]) -> Counter[str]:
    return Counter(map(as_text, configurations))


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def rows(out: Path) -> int:
    """Number of epochs on all curves."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/curve.jsonl"))


def command(words: Sequence[str], log: Path, system: str) -> None:
    """Run ``aida search`` with these arguments, on a machine with the name ``system``."""
    import torch

    from aida_lab.cli import app

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if system:
        liveness.this_worker.cache_clear()
        liveness._system = lambda: system
        liveness.socket.gethostname = lambda: system
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(app(["search", *words], standalone_mode=False))


@contextmanager
def started(words: Sequence[str], log: Path, system: str = "") -> Iterator[BaseProcess]:
    """Start a worker process, and kill it at the end."""
    process = PROCESSES.Process(target=command, args=(list(words), log, system))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def ends_well(process: BaseProcess, log: Path) -> str:
    """Wait for a process, check that it succeeded and return its output."""
    process.join(90)
    said = log.read_text()
    assert process.exitcode == 0, said
    return said
