"""Train a queue of runs, one after another in this process or several at once in a worker pool.

A failure affects one run only. If a worker dies, its run is recorded as failed and another worker continues with the
queue. If this process ends in any way, the workers save their runs and exit, because their stdin is closed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name

import torch

from aida_lab.events import Event, Listener
from aida_lab.runs.files import StoreError
from aida_lab.runs.lock import is_held
from aida_lab.runs.records import CHECKPOINTS, DONE, LOCK, read_run, read_sessions
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.training.environment import changed_since
from aida_lab.training.options import Options
from aida_lab.workers.attempt import Outcome, attempt, gpu_is_usable
from aida_lab.workers.mps import Sharing, shared_gpu
from aida_lab.workers.pool import WorkerPool
from aida_lab.workers.worker import SAVE_TIMEOUT, WorkerConfig

#: Seconds between two polls of the workers or of locked run folders.
_POLL = 0.2

#: Environment variables that set the number of threads of numeric libraries.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Jobs:
    """How to train a queue of runs."""

    out: Path
    options: Options
    jobs: int = 1  #: Number of runs at once. A value of 1 trains in this process; larger values start worker processes.
    runner: str = "aida_lab.training.run:run"  #: function that trains a run, as ``module:function``

    def work(self, specs: Iterable[RunSpec], listen: Listener, stop: Stop) -> Iterator[Outcome]:
        """Train the runs and yield the outcome of each when it ends.

        The next item of ``specs`` is taken only when a worker is free, so that a search can decide late. Duplicates
        are trained once. When ``stop`` is asked, current runs are saved and no other starts.
        """
        waiting = _each_once(specs)
        if self.jobs == 1:
            yield from self._in_process(waiting, listen, stop)
            if stop.asked or gpu_is_usable():
                return
        yield from self._in_pool(waiting, listen, stop)

    def work_all(self, specs: Iterable[RunSpec], listen: Listener, stop: Stop) -> Iterator[Outcome]:
        """Like :meth:`work`, but wait for runs that another process trains, and resume them if it stops early."""
        left = list(specs)
        while left:
            busy: dict[str, Outcome] = {}
            for outcome in self.work(left, listen, stop):
                if outcome.state == "busy":
                    busy[outcome.key] = outcome
                else:
                    yield outcome
            left = [spec for spec in left if spec.key in busy]
            if left and not stop.asked:
                listen(Event("note", "", text=f"waiting for other processes that train {len(left)} of the runs"))
            while left and not stop.asked and all(is_held(self.out / spec.key / LOCK) for spec in left):
                time.sleep(_POLL)
            if stop.asked:
                yield from busy.values()
                return

    def _in_process(self, waiting: Iterator[RunSpec], listen: Listener, stop: Stop) -> Iterator[Outcome]:
        """Train in this process as long as its GPU is usable."""
        runner = resolve_name(self.runner)
        while not stop.asked and gpu_is_usable() and (spec := next(waiting, None)) is not None:
            outcome = self._skipped(spec, listen) or attempt(spec, self.out, self.options, listen, runner)
            if outcome.state == "interrupted":
                stop.ask()
            yield outcome

    def _in_pool(self, waiting: Iterator[RunSpec], listen: Listener, stop: Stop) -> Iterator[Outcome]:
        with ExitStack() as resources:
            pool = WorkerPool(self.jobs, lambda: self._worker_config(resources, listen))
            try:
                while True:
                    while not stop.asked and pool.has_room and (spec := next(waiting, None)) is not None:
                        outcome = self._skipped(spec, listen)
                        if outcome is None:
                            pool.submit(spec)
                        else:
                            yield outcome
                    if not pool.busy:
                        return
                    if stop.asked:
                        pool.stop()
                    yield from pool.outcomes(listen, _POLL)
            finally:
                pool.close(0.0 if stop.urgent else SAVE_TIMEOUT)

    def _worker_config(self, resources: ExitStack, listen: Listener) -> WorkerConfig:
        """Create the log folder, start MPS if needed and return the configuration of the workers."""
        logs = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="aida-jobs-")))
        sharing = Sharing("")
        if self.jobs > 1 and _is_on_gpu(self.options):
            sharing = resources.enter_context(shared_gpu())
            listen(Event("note", "", text=sharing.report))
        environment = {**os.environ, **sharing.environment, "PYTHONPATH": _module_path()}
        options = replace(self.options, at_once=self.jobs)
        if options.threads is None and _THREADS[0] not in os.environ:
            # depends on --jobs, not on the runs that are left: results differ in their last bits with the thread count
            options = replace(options, threads=max(cores() // self.jobs, 1))
        if options.threads is not None:
            environment.update(dict.fromkeys(_THREADS, str(options.threads)))
        return WorkerConfig(self.out, options, self.runner, logs, environment, sharing.fds)

    def _skipped(self, spec: RunSpec, listen: Listener) -> Outcome | None:
        """Skip a run that has its result and return the outcome; None if the run must be opened."""
        folder = self.out / spec.key
        record = read_run(folder) if folder.is_dir() else None
        if record is None or record.state not in DONE or self._must_open(folder, spec):
            return None
        listen(Event("skipped", spec.key, spec.epochs, spec.epochs, row=record.result or {}))
        return Outcome(spec.key, "skipped")

    def _must_open(self, folder: Path, spec: RunSpec) -> bool:
        """Whether a finished run must be opened: it has leftover checkpoints, or its code or data changed since."""
        if (folder / CHECKPOINTS).exists():
            return True
        with suppress(StoreError):
            return bool(changed_since(spec, read_sessions(folder), self.options.data_root))
        return False


def _module_path() -> str:
    """The module search path with the working directory last, so that a random.py there shadows no module."""
    here = os.getcwd()
    others = [path for path in sys.path if path not in ("", here)]
    return os.pathsep.join([*others, here] if len(others) < len(sys.path) else others)


def _each_once(specs: Iterable[RunSpec]) -> Iterator[RunSpec]:
    seen: set[str] = set()
    for spec in specs:
        if spec.key not in seen:
            seen.add(spec.key)
            yield spec


def _is_on_gpu(options: Options) -> bool:
    # must not initialize CUDA: this process would hold GPU memory, and use the GPU outside of MPS
    return options.device.startswith("cuda") if options.device is not None else torch.cuda.is_available()


def cores() -> int:
    """Number of CPU cores that this process may use; a container may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
