"""Runs for tests of tuning: no training, and a metric that is a known function of method, learning rate and seed."""

from __future__ import annotations

import math
from pathlib import Path

from aida_lab.events import Event
from aida_lab.runs.lock import RunBusyError
from aida_lab.runs.store import RunFolder
from aida_lab.spec import RunSpec
from aida_lab.training.options import Options

#: The best learning rate of each method.
OPTIMA = {"adamw": 2e-3, "sgd": 30.0, "aida-k1": 1e-7, "aida-k2": 1e-3}

#: What the next runs do, by test: "kill", "fail" or "busy" at the given number of runs.
PLANNED: dict[int, str] = {}
#: Runs that were begun.
BEGUN: list[RunSpec] = []


def accuracy(spec: RunSpec) -> float | None:
    """The metric at the best epoch; None for a run that diverges."""
    lr, optimum = spec.hyper["lr"], OPTIMA[spec.method]
    if lr > 1e3 * optimum:
        return None
    return round(95 - 8 * math.log10(lr / optimum) ** 2 + 0.1 * (spec.seed * 7 % 5) - spec.hyper.get("eps", 0.0), 4)


def run(spec: RunSpec, out: Path, options: Options, listen) -> dict:
    with RunFolder.open(out, spec) as folder:
        if folder.result is not None:
            listen(Event("skipped", spec.key, row=folder.result))
            return folder.result
        BEGUN.append(spec)
        planned = PLANNED.pop(len(BEGUN), "")
        if planned == "kill":
            raise KeyboardInterrupt
        if planned == "fail":
            raise RuntimeError("was asked to fail")
        if planned == "busy":
            raise RunBusyError("another process trains it")
        best = accuracy(spec)
        folder.begin_session({"process": 1, "device_type": "cpu"})
        values = [50.0, best or 60.0, (best or 60.0) - 1]
        for epoch, value in enumerate(values, start=1):
            row = {"epoch": epoch, "step": 20 * epoch, "lr": 0.1, "loss": 1 / epoch, "accuracy": value, "seconds": 0.5}
            folder.append_row(row)
        result = {
            "state": "finished" if best is not None else "diverged", "metric": "accuracy", "better": "higher",
            "best": max(values), "best_epoch": values.index(max(values)) + 1, "last": values[-1], "epochs": 3,
        }  # fmt: skip
        folder.finish(result)
        return result
