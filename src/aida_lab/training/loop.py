"""The training loop of a run, epoch by epoch, and its state for checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from aida.catalog import reading_for
from aida.stepsizes import Record, StepsizeProbe
from aida_lab import distributed, sharding
from aida_lab.experiments import find_experiment
from aida_lab.schedules import Restarted, Undecayed, WarmUp
from aida_lab.spec import RunSpec, Switch
from aida_lab.task import TaskContext
from aida_lab.training.environment import choose_device, set_up
from aida_lab.training.optimizers import LearningRate, build, can_be_captured, has_modes, set_mode
from aida_lab.training.options import Options
from aida_lab.training.steps import GraphSteps, PlainSteps

#: Called after every step. An exception from it interrupts the epoch.
AfterStep = Callable[[], None]


class Training:
    """One run: its task, optimizers and position. Creating it seeds torch and sets process-wide options."""

    def __init__(self, spec: RunSpec, options: Options) -> None:
        self.spec = spec
        self.experiment = find_experiment(spec.experiment)
        self.device = choose_device(options.device)
        set_up(spec, self.device, options.threads)
        torch.manual_seed(spec.seed)
        context = TaskContext(spec, self.device, options.data_root, options.inception, options.workers)
        self.task = self.experiment.task(context)
        self._sharded = options.shard is not None and distributed.world() > 1
        if self._sharded:
            for module in self.task.modules.values():
                sharding.shard(module, self.device)
        self._captured = self._captures(options.graph)
        rule = self.experiment.switches.get(spec.variant)
        self.switching = Switching(rule) if rule is not None and spec.optimizer == "sgd" else None
        self._build_optimizers(spec)
        declared = self.experiment.schedule
        if any(map(has_modes, self.optimizers.values())):  # it averages weights in place of a decay
            declared = Undecayed(declared)
        self._schedule = WarmUp(declared, spec.warmup) if spec.warmup else declared
        self.probes: list[StepsizeProbe] = []
        self.epoch = 0  #: completed epochs
        self.index = 0  #: steps taken in the current epoch
        self.step = 0  #: steps taken in all
        self.epoch_steps = 0  #: steps of the current epoch in all
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._seconds = 0.0  # of the current epoch, before it was interrupted
        self._began: float | None = None  # when this process started or resumed the epoch

    def _build_optimizers(self, spec: RunSpec) -> None:
        self.optimizers = {
            name: build(spec, module, self.device, sharded=self._sharded) for name, module in self.task.modules.items()
        }
        self._lr = LearningRate(self.optimizers.values())
        self.steps = (GraphSteps if self._captured else PlainSteps)(self.task, self.optimizers)

    def _switch(self, at: int) -> None:
        self._schedule = Restarted(self._schedule, at)
        self._build_optimizers(as_asgd(self.spec))

    def _captures(self, asked: bool | None) -> bool:
        possible = self.device.type == "cuda" and can_be_captured(self.spec)
        if asked and not possible:
            found = f"{self.spec.optimizer} on {self.device.type}"
            raise ValueError(f"--graph needs a capturable optimizer on cuda, and this is {found}; leave --graph out")
        return possible if asked is None else asked

    @property
    def has_stepsizes(self) -> bool:
        """Whether its optimizers have adaptive stepsizes; TypeError if that is unknown."""
        return all(reading_for(optimizer).stepsize is not None for optimizer in self.optimizers.values())

    def probe(self, sink: Callable[[Record], object]) -> None:
        """Measure stepsizes every ``spec.probe_every`` steps."""
        several = len(self.optimizers) > 1
        for name, optimizer in self.optimizers.items():
            named = self.task.modules[name].named_parameters(name if several else "")
            probe = StepsizeProbe(optimizer, named, self.spec.probe_every, sink, weights_only=True)
            probe.close()  # hooks do not run when a graph is replayed: the loop calls measure()
            self.probes.append(probe)

    def train_epoch(self, after_step: AfterStep = lambda: None) -> dict[str, Any]:
        """Train to the end of the current epoch and evaluate; returns the row of the curve."""
        self._began = time.perf_counter()
        steps = self.epoch_steps = self.task.begin_epoch(self.epoch)
        schedule, epochs = self._schedule, self.spec.epochs
        set_mode(self.optimizers.values(), "train")
        while self.index < steps:
            index = self.index
            factor = schedule.factor(self.epoch, self.step, epochs) * self.task.lr_factor(index)
            self._lr.set(self._lr.base * factor)
            self._loss += self.steps(self.task.kind(index), self.task.batch(index))
            self.index += 1
            self.step += 1
            if self.probes and self.step % self.spec.probe_every == 0:
                for probe in self.probes:
                    probe.measure(self.step)
            try:
                after_step()
            except BaseException:
                self._seconds, self._began = self._elapsed(), None
                raise
        loss = float(self._loss) / max(steps, 1)  # synchronizes
        seconds = self._elapsed()
        self._began = None
        lr = self._lr.base * schedule.factor(self.epoch, self.step - 1, epochs)
        began = time.perf_counter()
        final = self.epoch + 1 == epochs
        set_mode(self.optimizers.values(), "eval")
        measured = dict(self.task.evaluate(final)) if math.isfinite(loss) else {}
        set_mode(self.optimizers.values(), "train")  # a checkpoint is of the weights that train
        self.epoch += 1
        self.index, self._seconds = 0, 0.0
        self._loss.zero_()
        if self.switching is not None and self.switching.comes(measured, self.epoch):
            self._switch(self.epoch)
        return {
            "epoch": self.epoch,
            "step": self.step,
            "lr": lr,
            "loss": loss,
            **measured,
            "seconds": round(seconds, 4),
            "eval_seconds": round(time.perf_counter() - began, 4),
        }

    def _elapsed(self) -> float:
        """Training seconds of the current epoch, those before an interruption included."""
        return self._seconds + (time.perf_counter() - self._began if self._began is not None else 0.0)

    def state(self) -> dict[str, Any]:
        """All that a run needs to resume, as plain values and tensors; called by all ranks, used by rank 0."""
        state = {
            "epoch": self.epoch,
            "index": self.index,
            "step": self.step,
            "loss": self._loss,
            "seconds": self._elapsed(),
            "modules": {name: module.state_dict() for name, module in self.task.modules.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "task": self.task.extra_state(),
            "random": {
                "cpu": torch.get_rng_state(),
                **({"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}),
            },
            **({"switching": self.switching.state()} if self.switching is not None else {}),
        }
        return sharding.gathered(state) if self._sharded else state

    def resume(self, state: Mapping[str, Any] | None) -> bool:
        """Restore the state that rank 0 read from a checkpoint, if there is one; all ranks call it."""
        state = (sharding.outline if self._sharded else distributed.broadcast)(state)
        if state is not None:
            self.load(state)
        return state is not None

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`, before the first step."""
        self.epoch, self.index, self.step = state["epoch"], state["index"], state["step"]
        self._loss.copy_(state["loss"])
        self._seconds = state["seconds"]
        for name, module in self.task.modules.items():
            saved = state["modules"][name]
            module.load_state_dict(sharding.placed_module(saved, module) if self._sharded else saved)
        if self.switching is not None:
            self.switching.load(state["switching"])
            if self.switching.at is not None:
                self._switch(self.switching.at)
        for name, optimizer in self.optimizers.items():
            saved = state["optimizers"][name]
            optimizer.load_state_dict(sharding.placed_optimizer(saved, optimizer) if self._sharded else saved)
        self._lr.attach()
        self.task.load_extra_state(state["task"])
        torch.set_rng_state(state["random"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)


@dataclass
class Switching:
    """Replace SGD by ASGD during a run, as the public language-model script does.

    The switch comes when the perplexity of an epoch exceeds the lowest one of all earlier epochs but the last few. ASGD
    starts without momentum and at the run's first learning rate; only later decays of the schedule apply. The script
    keeps ASGD's averaged weights and never evaluates them. So the evaluated weights are those of plain SGD with the
    learning rate of the previous step, because torch's ASGD sets it for the next step.
    """

    rule: Switch
    seen: list[float] = field(default_factory=list)  #: the metric so far
    at: int | None = None  #: completed epochs at the switch; None before it

    def comes(self, measured: Mapping[str, float], epoch: int) -> bool:
        """Record the metric after ``epoch`` epochs; True if the switch comes now."""
        if self.at is not None or self.rule.key not in measured:
            return False
        value, earlier = measured[self.rule.key], self.seen[: -self.rule.interval]
        self.seen.append(value)
        if not earlier or not value > min(earlier):
            return False
        self.at = epoch
        return True

    def state(self) -> dict[str, Any]:
        return {"seen": list(self.seen), "at": self.at}

    def load(self, state: Mapping[str, Any]) -> None:
        self.seen, self.at = list(state["seen"]), state["at"]


def as_asgd(spec: RunSpec) -> RunSpec:
    """The spec of the second optimizer of a run."""
    kept = {name: spec.hyper[name] for name in ("lr", "weight_decay") if name in spec.hyper}
    return replace(spec, optimizer="torch.optim:ASGD", hyper={**kept, "t0": 0.0, "lambd": 0.0})
