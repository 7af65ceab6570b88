"""Train one run from its spec to its result: start it, resume it, or find it done.

A run saves checkpoints at intervals and before it stops on Ctrl-C. If it is killed at any moment, it resumes from the
last checkpoint and ends with the same result.
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
from aida_lab.experiments import experiments, find_experiment
from aida_lab.runs.checks import best_and_last
from aida_lab.runs.files import writing
from aida_lab.runs.records import STEPSIZES
from aida_lab.runs.store import RunFolder
from aida_lab.spec import Metric, RunSpec
from aida_lab.stopping import Stop
from aida_lab.training.environment import changed_since, changes, choose_device, describe, provenance
from aida_lab.training.loop import Training
from aida_lab.training.options import Options


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """The run was asked to stop, and saved a checkpoint first."""


def run(spec: RunSpec, out: Path, options: Options, listen: Listener = lambda event: None) -> Mapping[str, Any]:
    """Train or resume a run; returns its result. A finished run is not trained again.

    Under torchrun all processes call this together. Rank 0 alone opens the folder.
    """
    with ExitStack() as stack:
        device = distributed.join(choose_device(options.device))
        _check_processes(spec, options)
        if distributed.world() > 1:
            options = replace(options, graph=False)  # collectives are not captured
        elif options.shard:
            text = "one process, so nothing is sharded: torchrun --nproc-per-node N -m aida_lab train … starts several"
            listen(Event("note", spec.key, text=text))
        folder = stack.enter_context(RunFolder.open(out, spec)) if distributed.is_main() else None
        if folder is not None and (changed := changed_since(spec, folder.sessions(), options.data_root)):
            folder.restart()
            text = f"{changed}: trained again; the earlier files are in {folder.path / 'before'}"
            listen(Event("note", spec.key, text=text))
        done = distributed.broadcast(folder.result if folder is not None else None)
        if done is not None:
            listen(Event("skipped", spec.key, spec.epochs, spec.epochs, row=done, text="already done"))
            return dict(done)
        stack.enter_context(own_stream(device))
        stop = stack.enter_context(Stop())
        return _Run(spec, folder, replace(options, device=str(device)), listen, stop).train()


def _check_processes(spec: RunSpec, options: Options) -> None:
    """ValueError unless the experiment can be trained by these processes, sharded or not."""
    way, several = find_experiment(spec.experiment).distributed, distributed.world() > 1
    if options.shard and way != options.shard:
        able = ", ".join(each.name for each in experiments().values() if each.distributed == options.shard)
        raise ValueError(f"{spec.experiment} cannot be sharded; leave --shard out. These experiments can: {able}")
    if several and not way:
        raise ValueError(
            f"{spec.experiment} trains in one process; start it without torchrun, --jobs N trains several runs"
        )
    if several and way == "fsdp" and not options.shard:
        raise ValueError(f"{spec.experiment} trains in several processes only if it is sharded; add --shard fsdp")
    if several and options.shard and spec.probe_every:
        raise ValueError("--probe measures whole layers, and --shard splits them; use one of the two")


class _Run:
    """A run that trains. ``folder`` is None on every rank but 0."""

    def __init__(self, spec: RunSpec, folder: RunFolder | None, options: Options, listen: Listener, stop: Stop) -> None:
        self._spec, self._folder, self._options, self._listen, self._stop = spec, folder, options, listen, stop
        self._saved_at = time.monotonic()

    def train(self) -> Mapping[str, Any]:
        self._training = training = Training(self._spec, self._options)
        state = None
        if self._folder is not None:
            state = self._folder.load()
            self._begin_session(self._folder, resumed=state is not None)
        resumed = training.resume(state)
        self._say("started", text=f"resumed at epoch {training.epoch}" if resumed else "")
        with ExitStack() as sinks:
            if self._spec.probe_every and self._folder is not None:
                self._attach_probe(self._folder, sinks)
            while training.epoch < self._spec.epochs:
                row = training.train_epoch(self._after_step)
                if self._folder is not None:
                    self._folder.append_row(row)
                self._say("epoch", row)
                if training.switching is not None and training.switching.at == training.epoch:
                    self._say("note", text=f"SGD is replaced by ASGD after epoch {training.epoch}")
                if not math.isfinite(row["loss"]):
                    return self._finish("diverged", f"the loss was {row['loss']} in epoch {row['epoch']}")
                if training.epoch < self._spec.epochs:
                    self._save_if_due()
        return self._finish("finished")

    def _begin_session(self, folder: RunFolder, resumed: bool) -> None:
        """Record what decides the run's numbers besides its spec, and what of it changed since it was stopped."""
        training, options = self._training, self._options
        now = {
            **describe(training.device, training.steps.name, options.at_once),
            **provenance(self._spec, options.data_root),
        }
        before = folder.sessions()
        changed = changes(before[-1], now) if before and resumed else {}
        folder.begin_session({**now, **({"changed": changed} if changed else {})})
        for name, (old, new) in changed.items():
            self._say("note", text=f"resumed with other {name}: {old} before, {new} now; its numbers may differ")

    def _after_step(self) -> None:
        training = self._training
        share = training.index / training.epoch_steps
        self._listen(Event("step", self._spec.key, training.epoch, self._spec.epochs, share))
        if training.index < training.epoch_steps:
            self._save_if_due(within_epoch=True)

    def _save_if_due(self, within_epoch: bool = False) -> None:
        """Save a checkpoint if it is time or the run must stop; the ranks decide together, because all take part."""
        seconds = self._options.checkpoint_seconds  # 0: after every epoch
        due = time.monotonic() - self._saved_at >= seconds and not (within_epoch and not seconds)
        due, stop = distributed.any_rank(due, self._stop.asked, device=self._training.device)
        if due or stop:
            state = self._training.state()
            if self._folder is not None:
                self._folder.save(state, self._training.step)
            self._saved_at = time.monotonic()
        if stop:
            raise Interrupted(f"run {self._spec.key} was stopped and saved; the same command resumes it")

    def _finish(self, state: str, reason: str = "") -> Mapping[str, Any]:
        result: dict[str, Any] = {}
        if self._folder is not None:
            metric = self._training.experiment.metrics[self._spec.variant]
            result = result_of(state, metric, self._folder.rows(), reason)
            self._folder.finish(result)
        result = distributed.broadcast(result)
        self._say("diverged" if state == "diverged" else "finished", result, reason)
        return result

    def _attach_probe(self, folder: RunFolder, sinks: ExitStack) -> None:
        try:
            if not self._training.has_stepsizes:
                return  # such as SGD: nothing to record
        except TypeError as error:
            self._say("note", text=f"no stepsizes are recorded: {error}")
            return
        path = folder.path / STEPSIZES
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
            with writing(path):  # writes again what a full disk refused
                log.close()

        sinks.callback(close)
        self._training.probe(sink)

    def _say(self, kind: Kind, row: Mapping[str, Any] | None = None, text: str = "") -> None:
        self._listen(Event(kind, self._spec.key, self._training.epoch, self._spec.epochs, row=row or {}, text=text))


def result_of(state: str, metric: Metric, rows: list[dict[str, Any]], reason: str = "") -> dict[str, Any]:
    """The result of a run from its curve. It does not depend on time, or on how often the run was interrupted."""
    best, best_epoch, last = best_and_last(metric, rows)
    row = rows[-1] if rows else {}
    ours = ("epoch", "step", "lr", "loss", "seconds", "eval_seconds")
    return {
        "state": state,
        "metric": metric.key,
        "better": metric.better,
        "best": best,
        "best_epoch": best_epoch,
        "last": last,
        "epochs": row.get("epoch", 0),
        "steps": row.get("step", 0),
        "loss": row.get("loss"),
        "values": {key: value for key, value in row.items() if key not in ours},
        **({"reason": reason} if reason else {}),
    }


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Put all work of a run on its own stream: the default stream cannot be captured."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
