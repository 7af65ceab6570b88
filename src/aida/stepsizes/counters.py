"""The step counters of parameters, known to the host without asking the device.

Aida counts steps on the device, where a step may be skipped. Computing with a counter there takes
several launches of a kernel for a single number, and asking for it takes a wait. So the counters of
the last measurement are moved on by the steps since, and the true ones, which come to the host with
the measurement, say whether that was right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from aida.stepsizes import pieces as tensor_pieces
from aida.stepsizes.pieces import HostCopy, Slot


class StepCounters:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[Tensor, float] = {}
        self._known_at = 0
        self._watched: list[tuple[list[Tensor], Slot]] = []

    def guess(self, params: Sequence[Tensor], now: int) -> dict[Tensor, float]:
        """What the counters should be after step ``now``; asks the device where it has never been asked."""
        counters = {p: torch.as_tensor(self._optimizer.state[p]["step"]) for p in params}
        here = {p: float(counter) for p, counter in counters.items() if counter.device.type in tensor_pieces.HOSTS}
        there = [p for p in params if p not in here]
        if any(p not in self._known for p in there):
            copy = HostCopy()
            self.watch(there, copy)
            copy.fetch()
            self.confirm({}, now)
        moved = now - self._known_at
        return {**here, **{p: self._known[p] + moved for p in there}}

    def watch(self, params: Sequence[Tensor], copy: HostCopy) -> None:
        """Let the true counters come to the host with a copy."""
        apart: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in params:
            counter = torch.as_tensor(self._optimizer.state[p]["step"])
            if counter.device.type not in tensor_pieces.HOSTS:
                apart.setdefault((counter.device, counter.dtype), []).append(p)
        self._watched = [
            (mine, copy.add(torch.stack([self._optimizer.state[p]["step"] for p in mine]))) for mine in apart.values()
        ]

    def confirm(self, guesses: dict[Tensor, float], now: int) -> bool:
        """Whether the guesses were right, after the copy was fetched; the true counters are known from here on."""
        true = {p: value for params, slot in self._watched for p, value in zip(params, slot.values, strict=True)}
        self._known, self._known_at, self._watched = true, now, []
        return all(guesses.get(p) == value for p, value in true.items())
