"""One run from its spec to its result: begun, gone on with, or found done.

A run saves itself every so often, and before it gives way to Ctrl-C; killed at any moment it goes on from
the last checkpoint and ends as it would have ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aida.stepsizes import JsonLines, Record, TensorBoard
from aida_lab import distributed
from aida_lab.events import Event, Kind, Listener
from aida_lab.experiments import find_experiment
from aida_lab.runs.store import RunFolder, writing
from aida_lab.spec import Metric, RunSpec
from aida_lab.stopping import Stop
from aida_lab.training.environment import changes, choose_device, describe
from aida_lab.training.loop import Training
from aida_lab.training.options import Options
from aida_lab.training.provenance import changed_since, provenance


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """Somebody asked the run to stop, and it saved itself first."""


def run(spec: RunSpec, out: Path, options: Options, listen: Listener = lambda event: None) -> Mapping[str, Any]:
    """Train a run, or go on with it; returns its result, also where it is already there.

    Under torchrun all processes call this together: one of them has the folder, the others follow it.
    """
    with ExitStack() as stack:
        device = distributed.join(choose_device(options.device))
        if distributed.world() > 1:
            if not find_experiment(spec.experiment).distributed:
                raise ValueError(
                    f"{spec.experiment} trains in one process; start it without torchrun, --jobs N trains several runs"
                )
            options = replace(options, graph=False)  # an all-reduce of gradients is not recorded
        folder = stack.enter_context(RunFolder.open(out, spec)) if distributed.is_main() else None
        if folder is not None and (changed := changed_since(spec, folder.sessions(), options.data_root)):
            folder.begin_again()
            text = f"{changed}: trained again, and what was there is in {folder.path / 'before'}"
            listen(Event("note", spec.key, text=text))
        done = distributed.said_by_main(folder.result if folder is not None else None)
        if done is not None:
            listen(Event("skipped", spec.key, spec.epochs, spec.epochs, row=done, text="already done"))
            return dict(done)
        stack.enter_context(own_stream(device))
        stop = stack.enter_context(Stop())
        return _Run(spec, folder, replace(options, device=str(device)), listen, stop).carry_out()


class _Run:
    """A run under way; ``folder`` is None in a process that only follows."""

    def __init__(self, spec: RunSpec, folder: RunFolder | None, options: Options, listen: Listener, stop: Stop) -> None:
        self._spec, self._folder, self._options, self._listen, self._stop = spec, folder, options, listen, stop
        self._saved_at = time.monotonic()

    def carry_out(self) -> Mapping[str, Any]:
        self._training = training = Training(self._spec, self._options)
        state = None
        if self._folder is not None:
            state = self._folder.load()
            self._begin_session(self._folder, goes_on=state is not None)
        state = distributed.said_by_main(state)
        if state is not None:
            training.load(state)
        self._say("started", text=f"goes on at epoch {training.epoch}" if state is not None else "")
        with ExitStack() as sinks:
            if self._spec.probe_every and self._folder is not None:
                self._attach_probe(self._folder, sinks)
            while training.epoch < self._spec.epochs:
                row = training.train_epoch(self._after_step)
                if self._folder is not None:
                    self._folder.append_row(row)
                self._say("epoch", row)
                if training.switching is not None and training.switching.at == training.epoch:
                    self._say("note", text=f"SGD gives way to ASGD after epoch {training.epoch}")
                if not math.isfinite(row["loss"]):
                    return self._finish("diverged", f"the loss was {row['loss']} in epoch {row['epoch']}")
                if training.epoch < self._spec.epochs:
                    self._save_if_due()
                    self._give_way()
        return self._finish("finished")

    def _begin_session(self, folder: RunFolder, goes_on: bool) -> None:
        """Keep with the run what decides its numbers beside its spec, and what of it changed since it was stopped."""
        training, options = self._training, self._options
        now = {
            **describe(training.device, training.steps.name, options.at_once),
            **provenance(self._spec, options.data_root),
        }
        before = folder.sessions()
        changed = changes(before[-1], now) if before and goes_on else {}
        folder.begin_session({**now, **({"changed": changed} if changed else {})})
        for name, (old, new) in changed.items():
            self._say("note", text=f"goes on with other {name}: {old} before, {new} now; its numbers may differ")

    def _after_step(self) -> None:
        training = self._training
        share = training.index / training.epoch_steps
        self._listen(Event("step", self._spec.key, training.epoch, self._spec.epochs, share))
        if training.index < training.epoch_steps:
            if self._options.checkpoint_seconds:  # 0: after every epoch
                self._save_if_due()
            self._give_way()

    def _save_if_due(self) -> None:
        if time.monotonic() - self._saved_at >= self._options.checkpoint_seconds:
            self._save()

    def _save(self) -> None:
        if self._folder is not None:
            self._folder.save(self._training.state(), self._training.step)
        self._saved_at = time.monotonic()

    def _give_way(self) -> None:
        if distributed.any_of_us(self._stop.asked, self._training.device):
            self._save()
            raise Interrupted(f"run {self._spec.key} was stopped and saved; the same command goes on with it")

    def _finish(self, state: str, reason: str = "") -> Mapping[str, Any]:
        result: dict[str, Any] = {}
        if self._folder is not None:
            metric = self._training.experiment.metrics[self._spec.variant]
            result = summarise(state, metric, self._folder.rows(), reason)
            self._folder.finish(result)
        result = distributed.said_by_main(result)
        self._say("diverged" if state == "diverged" else "finished", result, reason)
        return result

    def _attach_probe(self, folder: RunFolder, sinks: ExitStack) -> None:
        try:
            if not self._training.has_stepsizes:
                return  # one of SGD's kind: nothing to record
        except TypeError as error:
            self._say("note", text=f"no stepsizes are recorded: {error}")
            return
        path = folder.stepsizes_path
        log = JsonLines(path)
        board = TensorBoard(folder.path / "tensorboard") if self._options.tensorboard else None

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
        self._training.probe(sink)

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
def own_stream(device: torch.device) -> Iterator[None]:
    """All work of a run on a stream of its own: the default one can't be recorded."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
