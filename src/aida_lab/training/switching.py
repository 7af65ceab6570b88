"""A change of optimizer within a run: the public language-model script turns SGD into ASGD.

Its test: the perplexity of an epoch is above the lowest of all epochs before it but the last few. The new optimizer
has no momentum and the run's first learning rate again; of the schedule only later decays count. The script keeps
ASGD's average of the weights and never measures it, so the weights that are measured are those of plain SGD, whose
step has the learning rate of the step before it: torch's ASGD sets it for the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aida_lab.spec import RunSpec, Switch


def as_asgd(spec: RunSpec) -> RunSpec:
    """The spec by which the second optimizer of a run is built."""
    kept = {name: spec.hyper[name] for name in ("lr", "weight_decay") if name in spec.hyper}
    return replace(spec, optimizer="torch.optim:ASGD", hyper={**kept, "t0": 0.0, "lambd": 0.0})


@dataclass
class Switching:
    """A run's way to its switch: what was measured so far, and when it came."""

    rule: Switch
    seen: list[float] = field(default_factory=list)
    #: Epochs completed when it came; None before.
    at: int | None = None

    def comes(self, measured: Mapping[str, float], epoch: int) -> bool:
        """Take note of what was measured after ``epoch`` epochs; True if the switch comes now."""
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
