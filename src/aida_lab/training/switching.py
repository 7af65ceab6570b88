"""Replace SGD by ASGD during a run, as the public language-model script does.

The switch comes when the perplexity of an epoch exceeds the lowest one of all earlier epochs but the last few. ASGD
starts without momentum and at the run's first learning rate; only later decays of the schedule apply. The script keeps
ASGD's averaged weights and never evaluates them. So the evaluated weights are those of plain SGD with the learning
rate of the previous step, because torch's ASGD sets it for the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aida_lab.spec import RunSpec, Switch


def as_asgd(spec: RunSpec) -> RunSpec:
    """The spec of the second optimizer of a run."""
    kept = {name: spec.hyper[name] for name in ("lr", "weight_decay") if name in spec.hyper}
    return replace(spec, optimizer="torch.optim:ASGD", hyper={**kept, "t0": 0.0, "lambd": 0.0})


@dataclass
class Switching:
    """The metric so far, and when the switch came."""

    rule: Switch
    seen: list[float] = field(default_factory=list)
    #: Completed epochs at the switch; None before it.
    at: int | None = None

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
