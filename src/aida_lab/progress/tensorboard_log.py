"""A run's curve for TensorBoard, beside the files that the lab itself reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aida_lab.events import Event

#: Columns of the curve that place a row and are not drawn.
_PLACES = ("epoch", "step")


class TensorboardLog:
    """Listens to one run: every number of an epoch becomes a scalar at its step, such as ``epoch/loss``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if event.kind != "epoch":
            return
        step = event.row["step"]
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # a killed run repeats what came after its last checkpoint: TensorBoard then forgets the first time
            self._writer = SummaryWriter(str(self._folder), purge_step=step)  # type: ignore[no-untyped-call]
        for name, value in event.row.items():
            if name not in _PLACES and value is not None:
                self._writer.add_scalar(f"epoch/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
