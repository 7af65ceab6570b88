"""Runs for tests of the queue. They run in real processes without training; ``does`` selects what happens."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import warnings
from pathlib import Path

from aida_lab.events import Event
from aida_lab.runs.store import RunFolder
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.training.options import Options
from aida_lab.training.run import Interrupted


def spec(seed: int, epochs: int = 2, **do) -> RunSpec:
    """``does``: finish, raise, exit, quit, kill, crash, diverge, print, warn, save, sleep, dead-gpu."""
    return RunSpec("digits", "sgd", {"lr": 0.1, **do}, seed, epochs, 64, "fp32")


def run(spec: RunSpec, out: Path, options: Options, listen) -> dict:
    with RunFolder.open(out, spec) as folder:
        if folder.result is not None:
            listen(Event("skipped", spec.key, row=folder.result))
            return folder.result
        with Stop() as stop:
            return _run(spec, folder, options, listen, stop)


def _run(spec: RunSpec, folder: RunFolder, options: Options, listen, stop: Stop) -> dict:
    does = spec.hyper.get("does", "finish")
    omp = os.environ.get("OMP_NUM_THREADS")
    given = {"options": repr(options), "threads": options.threads, "at_once": options.at_once}
    folder.begin_session({"process": os.getpid(), "omp": omp, **given})
    state = folder.load() or {"epoch": 0}
    listen(Event("started", spec.key, state["epoch"], spec.epochs))
    if does == "raise":
        raise ValueError(f"seed {spec.seed} was asked to fail\nat length")
    if does == "dead-gpu":  # like after a failed assertion in a kernel
        sys.modules["aida_lab.workers.worker"].gpu_is_usable = lambda: False
        raise RuntimeError("CUDA error: device-side assert triggered")
    if does == "exit":
        print("the last words of the process", file=sys.stderr, flush=True)
        os._exit(7)
    if does == "quit":
        sys.exit("the step had enough")
    if does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "crash":
        ctypes.string_at(0)
    if does == "print":
        print("{not json}" * 100, flush=True)
        os.write(1, b"from C\n")
    if does == "warn":
        warnings.warn("a library's warning", stacklevel=2)
        warnings.warn_explicit("a checkpoint is damaged", UserWarning, RunFolder.__init__.__code__.co_filename, 1)
    if does == "sleep":
        end = time.monotonic() + 60
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.01)
    for epoch in range(state["epoch"] + 1, spec.epochs + 1):
        if stop.asked:
            folder.save({"epoch": epoch - 1}, epoch - 1)
            raise Interrupted("stopped, and saved")
        row = {"epoch": epoch, "step": epoch, "lr": 0.1, "loss": 1 / epoch, "accuracy": 90.0 + epoch, "seconds": 0.1}
        folder.append_row(row)
        if does == "save":
            folder.save({"epoch": epoch}, epoch)
            time.sleep(0.05)
        listen(Event("epoch", spec.key, epoch, spec.epochs, row=row))
    ended = "diverged" if does == "diverge" else "finished"
    best = {"best": 90.0 + spec.epochs, "best_epoch": spec.epochs, "last": 90.0 + spec.epochs}
    result = {"state": ended, "metric": "accuracy", "better": "higher", **best, "epochs": spec.epochs}
    folder.finish(result)
    listen(Event(ended, spec.key, spec.epochs, spec.epochs, row=result))
    return result
