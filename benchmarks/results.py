"""What is measured and what came out, as values."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import Any

from shapes import Shapes, elements


@dataclass(frozen=True)
class Workload:
    """The parameters of one model, in so many groups: a column of the table."""

    name: str
    shapes: Shapes
    groups: int = 1

    @property
    def label(self) -> str:
        size = elements(self.shapes)
        count = f"{size / 1e9:.2f}B" if size >= 1e9 else f"{size / 1e6:.1f}M"
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        return f"{self.name} ({count} in {len(self.shapes)} tensors, {groups})"


@dataclass(frozen=True)
class Entry:
    """One optimizer on one workload in one mode: a measurement, or the reason why there is none."""

    workload: str  #: its label
    mode: str  #: "eager", "queued" or "graph"
    optimizer: str
    params: int
    groups: int
    bytes_per_param: int | None = None
    samples_ms: list[float] = field(default_factory=list)
    steps_per_sample: int | None = None
    peak_temporary: float | None = None  #: bytes a step allocates, in units of the parameters' bytes
    error: str | None = None

    @property
    def ms(self) -> float | None:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.samples_ms) < 2:
            return None
        low, middle, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return (high - low) / 2 / middle

    @property
    def bytes_per_second(self) -> float | None:
        """What the memory delivered if the step moved what it must and no more."""
        if self.ms is None or self.bytes_per_param is None:
            return None
        return self.bytes_per_param * self.params / self.ms * 1e3

    def as_json(self, copy_bytes_per_second: float | None) -> dict[str, Any]:
        rate = self.bytes_per_second
        return {
            **dataclasses.asdict(self),
            "ms": self.ms,
            "spread": self.spread,
            "n": len(self.samples_ms),
            "bytes_per_second": rate,
            "share_of_copy": None if rate is None or copy_bytes_per_second is None else rate / copy_bytes_per_second,
        }
