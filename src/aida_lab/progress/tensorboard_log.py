"""A run's curve for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aida_lab.events import Event

#: Columns of the curve that are not drawn.
_POSITION = ("epoch", "step")


class TensorboardLog:
    """Listens to one run and writes every number of an epoch as a scalar, such as ``epoch/loss``, at its step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if event.kind != "epoch":
            return
        step = event.row["step"]
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # a killed run repeats the epochs after its last checkpoint: TensorBoard discards the first ones
            self._writer = SummaryWriter(str(self._folder), purge_step=step)  # type: ignore[no-untyped-call]
        for name, value in event.row.items():
            if name not in _POSITION and value is not None:
                self._writer.add_scalar(f"epoch/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
