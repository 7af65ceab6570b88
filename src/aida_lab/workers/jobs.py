"""Many runs, some at once: a queue, and processes that outlive a run but not this one.

Each run's failure is its own. A process that dies takes no other run along: its run is noted as failed and
another process takes the rest of the queue. When this process ends, however it ends, the others save what
they train and end too, for the pipe that they read their requests from is then closed.
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

import torch

from aida_lab.events import Event, Listener
from aida_lab.runs.lock import is_held
from aida_lab.runs.records import CHECKPOINTS, LOCK
from aida_lab.runs.store import DONE, StoreError, read_run, read_sessions
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.training.options import Options
from aida_lab.training.provenance import changed_since
from aida_lab.workers.attempt import RUNNER, Outcome, attempt, gpu_is_usable, runner_named
from aida_lab.workers.mps import Sharing, shared_gpu
from aida_lab.workers.pool import Crew, Orders
from aida_lab.workers.worker import GRACE

#: Seconds between two looks at processes that say nothing.
_LOOK = 0.2

#: What numeric libraries take their number of threads from.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Jobs:
    """How runs are worked off."""

    out: Path
    options: Options
    #: Runs at once; one is trained in this process, several have processes of their own.
    jobs: int = 1
    #: Function that trains, as ``module:function``.
    runner: str = RUNNER

    def work(self, specs: Iterable[RunSpec], listen: Listener, stop: Stop) -> Iterator[Outcome]:
        """Train the runs and yield how each ended, as it ends.

        ``specs`` is asked for the next run only when there is room for it, so that a search may decide late. A run
        that comes twice is one. When ``stop`` is asked, the runs at hand are saved and no other begins.
        """
        waiting = _each_once(specs)
        if self.jobs == 1:
            yield from self._here(waiting, listen, stop)
            if stop.asked or gpu_is_usable():
                return
        yield from self._side_by_side(waiting, listen, stop)

    def work_all(self, specs: Iterable[RunSpec], listen: Listener, stop: Stop) -> Iterator[Outcome]:
        """As :meth:`work`; a run that another process has is waited for, and gone on with where that one left it."""
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
                listen(Event("note", "", text=f"waiting for other processes to end with {len(left)} of the runs"))
            while left and not stop.asked and all(is_held(self.out / spec.key / LOCK) for spec in left):
                time.sleep(_LOOK)
            if stop.asked:
                yield from busy.values()
                return

    def _here(self, waiting: Iterator[RunSpec], listen: Listener, stop: Stop) -> Iterator[Outcome]:
        """In this process, as long as it can do it."""
        runner = runner_named(self.runner)
        while not stop.asked and gpu_is_usable() and (spec := next(waiting, None)) is not None:
            outcome = self._found(spec, listen) or attempt(spec, self.out, self.options, listen, runner)
            if outcome.state == "interrupted":
                stop.ask()
            yield outcome

    def _side_by_side(self, waiting: Iterator[RunSpec], listen: Listener, stop: Stop) -> Iterator[Outcome]:
        with ExitStack() as machine:
            crew = Crew(self.jobs, lambda: self._orders(machine, listen))
            try:
                while True:
                    while not stop.asked and crew.has_room and (spec := next(waiting, None)) is not None:
                        found = self._found(spec, listen)
                        if found is None:
                            crew.give(spec)
                        else:
                            yield found
                    if not crew.busy:
                        return
                    if stop.asked:
                        crew.stop()
                    yield from crew.outcomes(listen, _LOOK)
            finally:
                crew.close(0.0 if stop.urgent else GRACE)

    def _orders(self, machine: ExitStack, listen: Listener) -> Orders:
        """Prepare the machine for processes side by side."""
        logs = Path(machine.enter_context(tempfile.TemporaryDirectory(prefix="aida-jobs-")))
        sharing = Sharing("")
        if self.jobs > 1 and _is_on_gpu(self.options):
            sharing = machine.enter_context(shared_gpu())
            listen(Event("note", "", text=sharing.report))
        environment = {**os.environ, **sharing.environment, "PYTHONPATH": _module_path()}
        options = replace(self.options, at_once=self.jobs)
        if options.threads is None and _THREADS[0] not in os.environ:
            # by the number asked for, not by how many runs are left: another number of threads gives other bits
            options = replace(options, threads=max(cores() // self.jobs, 1))
        if options.threads is not None:
            environment.update(dict.fromkeys(_THREADS, str(options.threads)))
        return Orders(self.out, options, self.runner, logs, environment, sharing.held)

    def _found(self, spec: RunSpec, listen: Listener) -> Outcome | None:
        """The outcome of a run that needs no process to be done; None where it has work to do."""
        folder = self.out / spec.key
        record = read_run(folder) if folder.is_dir() else None
        if record is None or record.state not in DONE or self._has_work(folder, spec):
            return None
        listen(Event("skipped", spec.key, spec.epochs, spec.epochs, row=record.result or {}))
        return Outcome(spec.key, "skipped")

    def _has_work(self, folder: Path, spec: RunSpec) -> bool:
        """Whether a run that has its result is to be opened: for checkpoints left by a kill, or other code or data."""
        if (folder / CHECKPOINTS).exists():
            return True
        with suppress(StoreError):
            return bool(changed_since(spec, read_sessions(folder), self.options.data_root))
        return False


def _module_path() -> str:
    """Where modules are found here; but the folder we work in comes last, so that a random.py there replaces none."""
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
    # asked without opening the GPU: this process would hold memory on it, and share it outside of MPS
    return options.device.startswith("cuda") if options.device is not None else torch.cuda.is_available()


def cores() -> int:
    """Cores this process may use, which a container may have fewer of than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
