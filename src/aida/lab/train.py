"""One run from its spec to its result: begun, gone on with, or found done.

A run saves itself every so often, and before it gives way to Ctrl-C; killed at any moment it goes on from
the last checkpoint and ends as it would have ended.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aida.lab.environment import describe
from aida.lab.events import Event, Kind, Listener
from aida.lab.spec import Metric, RunSpec
from aida.lab.store import RunFolder, writing
from aida.lab.training import Training
from aida.stepsizes import JsonLines, Record, TensorBoard


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """Somebody asked the run to stop, and it saved itself first."""


@dataclass(frozen=True)
class Options:
    """How a run is carried out: nothing here decides its numbers."""

    device: str | None = None  #: None: a GPU where there is one
    data_root: Path | None = None
    inception: Path | None = None
    workers: int = 4
    graph: bool | None = None  #: None: CUDA graphs wherever they are possible
    checkpoint_seconds: float = 30.0
    threads: int | None = None
    tensorboard: bool = False


def run(spec: RunSpec, out: Path, options: Options, listen: Listener = lambda event: None) -> Mapping[str, Any]:
    """Train a run, or go on with it; returns its result, also where it is already there."""
    with RunFolder.open(out, spec) as folder:
        if folder.result is not None:
            listen(Event("skipped", spec.key, spec.epochs, spec.epochs, row=folder.result, text="already done"))
            return folder.result
        with own_stream(options), _stop_signals() as stop:
            return _Run(folder, options, listen, stop).carry_out()


class _Run:
    def __init__(self, folder: RunFolder, options: Options, listen: Listener, stop: threading.Event) -> None:
        self._folder, self._options, self._listen, self._stop = folder, options, listen, stop
        self._spec = folder.spec
        self._saved_at = time.monotonic()

    def carry_out(self) -> Mapping[str, Any]:
        options = self._options
        self._training = training = Training(
            self._spec,
            device=options.device,
            data_root=options.data_root,
            inception=options.inception,
            workers=options.workers,
            graph=options.graph,
            threads=options.threads,
        )
        self._folder.begin_session(describe(training.device, training.steps.name))
        if (state := self._folder.load()) is not None:
            training.load(state)
        self._say("started", text=f"goes on at epoch {training.epoch}" if state is not None else "")
        with ExitStack() as sinks:
            if self._spec.probe_every:
                self._attach_probe(sinks)
            while training.epoch < self._spec.epochs:
                row = training.train_epoch(self._after_step)
                self._folder.append_row(row)
                self._say("epoch", row)
                if not math.isfinite(row["loss"]):
                    return self._finish("diverged", f"the loss was {row['loss']} in epoch {row['epoch']}")
                if training.epoch < self._spec.epochs:
                    self._save_if_due(self._options.checkpoint_seconds)
                    self._give_way()
        return self._finish("finished")

    def _after_step(self) -> None:
        training = self._training
        share = training.index / training.epoch_steps
        self._listen(Event("step", self._spec.key, training.epoch, self._spec.epochs, share))
        if training.index < training.epoch_steps:
            if self._options.checkpoint_seconds:  # 0: after every epoch
                self._save_if_due(self._options.checkpoint_seconds)
            self._give_way()

    def _save_if_due(self, seconds: float) -> None:
        if time.monotonic() - self._saved_at >= seconds:
            self._save()

    def _save(self) -> None:
        self._folder.save(self._training.state(), self._training.step)
        self._saved_at = time.monotonic()

    def _give_way(self) -> None:
        if self._stop.is_set():
            self._save()
            raise Interrupted(f"{self._folder.path} was stopped and saved; the same command goes on with it")

    def _finish(self, state: str, reason: str = "") -> Mapping[str, Any]:
        metric = self._training.experiment.metrics[self._spec.variant]
        result = summarise(state, metric, self._folder.rows(), reason)
        self._folder.finish(result)
        self._say("diverged" if state == "diverged" else "finished", result, reason)
        return result

    def _attach_probe(self, sinks: ExitStack) -> None:
        path = self._folder.stepsizes_path
        log = JsonLines(path)
        board = TensorBoard(self._folder.path / "tensorboard") if self._options.tensorboard else None

        def sink(record: Record) -> None:
            with writing(path):
                log(record)
            if board is not None:
                board(record)

        def close() -> None:
            if board is not None:
                board.close()
            with writing(path):  # what a full disk refused before, it refuses again
                log.close()

        sinks.callback(close)
        try:
            self._training.probe(sink)
        except TypeError as error:
            self._say("note", text=f"no stepsizes are recorded: {error}")

    def _say(self, kind: Kind, row: Mapping[str, Any] | None = None, text: str = "") -> None:
        self._listen(Event(kind, self._spec.key, self._training.epoch, self._spec.epochs, row=row or {}, text=text))


def summarise(state: str, metric: Metric, rows: list[dict[str, Any]], reason: str = "") -> dict[str, Any]:
    """The result of a run by its curve; nothing in it depends on time or on how often the run was broken off."""
    best: float | None = None
    best_epoch = None
    for row in rows:
        value = row.get(metric.key)
        if value is not None and metric.improves(value, best):
            best, best_epoch = value, row["epoch"]
    ours = ("epoch", "step", "lr", "loss", "seconds", "eval_seconds")
    last = rows[-1] if rows else {}
    return {
        "state": state,
        "metric": metric.key,
        "better": metric.better,
        "best": best,
        "best_epoch": best_epoch,
        "last": last.get(metric.key),
        "epochs": last.get("epoch", 0),
        "steps": last.get("step", 0),
        "loss": last.get("loss"),
        "values": {key: value for key, value in last.items() if key not in ours},
        **({"reason": reason} if reason else {}),
    }


@contextmanager
def own_stream(options: Options) -> Iterator[None]:
    """All work of a run on a stream of its own: the default one can't be recorded."""
    if not torch.cuda.is_available() or (options.device or "cuda").partition(":")[0] != "cuda":
        yield
        return
    device = torch.device(options.device or "cuda")
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C or SIGTERM; the second ends the process as ever. Only in the main thread."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
