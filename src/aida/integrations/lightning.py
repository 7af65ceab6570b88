"""Lightning: a callback that logs adaptive stepsizes. ``configure_optimizers`` returns Aida as any optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from aida.stepsizes import StepsizeProbe
from aida.stepsizes.trackers import Tracker


class StepsizeMonitor(Callback):
    """Measures the adaptive stepsizes during training, and passes them to the Trainer's loggers.

    The loggers receive ``stepsizes/mean/<layer>``, ``stepsizes/spread`` and so on, with the number of optimizer steps.
    If there are several optimizers, the names of all but the first begin with ``stepsizes-1/``, ``stepsizes-2/``.

    Args:
        every (int, optional, default: None): measure after each step whose number is a multiple of this. None means
            the Trainer's ``log_every_n_steps``.
        values (sequence of str, default: ("mean", "at_bound")): the fields of a layer's record to log. The numbers
            across all layers are always logged.
        weights_only (bool, default: True): leave out tensors with fewer than two dimensions: biases and norms.
    """

    def __init__(
        self, every: int | None = None, values: Sequence[str] = ("mean", "at_bound"), weights_only: bool = True
    ) -> None:
        self._every, self._values, self._weights_only = every, values, weights_only
        self._probes: list[StepsizeProbe] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.loggers:
            raise MisconfigurationException("StepsizeMonitor needs a logger: leave logger=True, or remove the callback")
        self._close()  # an earlier training was interrupted
        for number, optimizer in enumerate(trainer.optimizers):
            self._probes.append(
                StepsizeProbe(
                    optimizer,
                    pl_module.named_parameters(),
                    every=self._every or trainer.log_every_n_steps or 50,
                    sink=_Loggers(trainer, self._values, f"stepsizes-{number}/" if number else "stepsizes/"),
                    weights_only=self._weights_only,
                    start=trainer.global_step // len(trainer.optimizers),
                )
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def _close(self) -> None:
        for probe in self._probes:
            probe.close()
        self._probes = []


class _Loggers(Tracker):
    """Sink that passes the numbers of a measurement to all loggers of a Trainer."""

    def __init__(self, trainer: Trainer, values: Sequence[str], prefix: str) -> None:
        super().__init__(values)
        self._trainer, self._prefix = trainer, prefix

    def _log(self, values: dict[str, float], step: int) -> None:
        named = {self._prefix + name.removeprefix("stepsizes/"): value for name, value in values.items()}
        for logger in self._trainer.loggers:
            logger.log_metrics(named, step=step)
