"""The step counters of parameters, predicted on the host without synchronizing.

Aida counts steps on the device, where a step may be skipped. Computing with a counter there takes several
kernel launches for a single number, and reading it synchronizes. So the host predicts: the counters of the
last measurement plus the steps since. The true counters are copied with the measurement and confirm it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from aida.stepsizes import _pieces as tensor_pieces
from aida.stepsizes._pieces import HostCopy, Slot

#: Counters of one device and dtype in one tensor, with the indices of their parameters.
_Counters = tuple[list[int], Tensor]


class StepCounters:
    """Predicts the counters of parameters. For parameters that it has not seen last it reads the device."""

    def __init__(self) -> None:
        self._params: Sequence[Tensor] = ()
        self._known: dict[int, float] = {}  #: by the parameter's index; only counters on a device
        self._known_at = 0
        self._watched: list[tuple[list[int], Slot]] = []

    def guess(self, params: Sequence[Tensor], counters: Sequence[Any], now: int, copy: HostCopy) -> list[float]:
        """Predict the parameters' counters after step ``now``; the true ones come with the copy."""
        steps = [0.0] * len(params)
        there: list[_Counters] = []
        for places, numbers in _alike(counters):
            if numbers.device.type not in tensor_pieces.HOSTS:
                there.append((places, numbers))
                continue
            for place, number in zip(places, numbers.tolist(), strict=True):
                steps[place] = number
        if not self._knows(params, there):
            asked = HostCopy()
            self._watch(there, asked)
            asked.fetch()
            self._learn(now)
        self._params = params
        self._known = {place: number + now - self._known_at for place, number in self._known.items()}
        self._known_at = now
        self._watch(there, copy)
        for place, number in self._known.items():
            steps[place] = number
        return steps

    def confirm(self) -> bool:
        """Whether the last prediction was right; call it after the copy is fetched."""
        guessed = self._known
        self._learn(self._known_at)
        return guessed == self._known

    def _knows(self, params: Sequence[Tensor], there: Iterable[_Counters]) -> bool:
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        return same and self._known.keys() == {place for places, _ in there for place in places}

    def _watch(self, there: Iterable[_Counters], copy: HostCopy) -> None:
        self._watched = [(places, copy.add(numbers)) for places, numbers in there]

    def _learn(self, now: int) -> None:
        true = ((places, slot.values.tolist()) for places, slot in self._watched)
        self._known = {place: n for places, numbers in true for place, n in zip(places, numbers, strict=True)}
        self._known_at, self._watched = now, []


def _alike(counters: Sequence[Any]) -> Iterator[_Counters]:
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for place, counter in enumerate(counters):
        number = torch.as_tensor(counter)
        places, numbers = alike.setdefault((number.device, number.dtype), ([], []))
        places.append(place)
        numbers.append(number)
    return ((places, torch.stack(numbers).flatten()) for places, numbers in alike.values())
