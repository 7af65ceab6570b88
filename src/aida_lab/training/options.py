"""Options of a run that do not define it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Options:
    """How a run is executed. Nothing here changes its numbers, except for the last bits (see ``threads``)."""

    device: str | None = None  #: None: a GPU if there is one
    data_root: Path | None = None
    inception: Path | None = None
    workers: int = 4
    graph: bool | None = None  #: None: CUDA graphs if possible
    checkpoint_seconds: float = 30.0
    threads: int | None = None  #: on a CPU, sums are split among threads: another number of them rounds differently
    at_once: int = 1  #: how many runs train at the same time
    tensorboard: bool = False
    shard: Literal["fsdp"] | None = None  #: how the processes of torchrun split the model; None: they do not
