"""How a run is carried out, beside what it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """How a run is carried out: nothing here decides its numbers, but for the last bits (see ``threads``)."""

    device: str | None = None  #: None: a GPU where there is one
    data_root: Path | None = None
    inception: Path | None = None
    workers: int = 4
    graph: bool | None = None  #: None: CUDA graphs wherever they are possible
    checkpoint_seconds: float = 30.0
    threads: int | None = None  #: on a CPU, sums are split among them: another number rounds otherwise
    at_once: int = 1  #: runs side by side, this one among them
    tensorboard: bool = False
