"""Who takes part in a step, remembered between steps.

Sorting a model's tensors into batches costs more host time than launching the kernels that update
them. Between two steps of a training loop only gradients move, so the batches of the last step are
kept and handed out again as long as everything they rest on is the same; looking costs a fraction
of sorting. A roster that no longer holds is thrown away, never repaired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor

from aida.backends import Batch
from aida.backends.choice import Route
from aida.backends.tables import lies_like
from aida.hyper import Hyper

_address = torch.Tensor.data_ptr
_params = itemgetter("params")
_stride = torch.Tensor.stride
_dtype = attrgetter("dtype")


def all_params(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return list(chain.from_iterable(map(_params, groups)))


class Roster:
    """The batches of one step, and what must not change for them to serve the next."""

    def __init__(self, params: list[Tensor], grads: list[Tensor | None], state: dict[Any, Any]) -> None:
        present = [grad for grad in grads if grad is not None]
        self._params = params
        self._addresses = list(map(_address, params))
        self._strides = list(map(_stride, params))
        self._present = [grad is not None for grad in grads]
        self._all_present = all(self._present)
        self._grad_dtypes = list(map(_dtype, present))
        self._grad_strides = list(map(_stride, present))
        self._alike = all(map(lies_like, present, compress(params, self._present)))
        # Autograd leaves the imaginary part of a conjugate negative by a mark alone. Such a part has gaps, so that
        # only a single element can lie like its parameter.
        self._single = [index for index, grad in enumerate(present) if grad.numel() == 1]
        self._state_keys = list(state)
        self._state_values = list(state.values())
        # a hook may keep a number of its own beside the parameters' state
        self._state_dicts = [kept for kept in self._state_values if isinstance(kept, dict)]
        self._state_tensors = _contents(self._state_dicts)
        self._hypers: list[Hyper] | None = None
        self._seats: list[tuple[Batch, list[bool] | None]] = []
        self.batches: dict[Route, Batch] = {}

    def seat(self, batches: dict[Route, Batch]) -> None:
        """Keep the batches, and which of the present gradients goes into which."""
        self.batches = batches
        present = list(compress(self._params, self._present))
        for batch in batches.values():
            mine = set(map(id, batch.params))  # not of the gradients: two parameters may share one
            self._seats.append((batch, None if len(batches) == 1 else [id(p) in mine for p in present]))

    def recall(
        self, params: list[Tensor], grads: list[Tensor | None], state: dict[Any, Any], hypers: list[Hyper]
    ) -> dict[Route, Batch] | None:
        """The batches with this step's gradients and values; None if anything but those changed."""
        if not self._holds(params, state):
            return None
        present: list[Tensor] = grads  # type: ignore[assignment]
        if not self._all_present or not all(map(is_not, grads, repeat(None))):
            if [grad is not None for grad in grads] != self._present:
                return None
            present = [grad for grad in grads if grad is not None]
        if list(map(_dtype, present)) != self._grad_dtypes:
            return None
        try:
            alike = self._alike and list(map(_stride, present)) == self._grad_strides
        except RuntimeError:  # a sparse gradient has no strides; sorting refuses it with a reason
            return None
        alike = alike and not any(present[index].is_neg() for index in self._single)
        for batch, wanted in self._seats:
            batch.grads = present if wanted is None else list(compress(present, wanted))
            batch.grads_lie_alike = alike
            if hypers is not self._hypers:  # else the same list: what is known of it stays known
                batch.runs = [(hypers[group], count) for group, count in zip(batch.groups, batch.counts(), strict=True)]
            batch.grad_scale = batch.found_inf = None
        self._hypers = hypers
        return self.batches

    def _holds(self, params: list[Tensor], state: dict[Any, Any]) -> bool:
        """Whether parameters and state are the same objects; ``.data`` swapped behind one shows in its address."""
        return (
            _same(params, self._params)
            and list(map(_address, params)) == self._addresses
            and list(map(_stride, params)) == self._strides
            and _same(state, self._state_keys)
            and _same(state.values(), self._state_values)
            and _same(_contents(self._state_dicts), self._state_tensors)
        )


def _contents(states: list[dict[str, Any]]) -> list[Any]:
    """All that is kept for all parameters, as one list: an entry may be replaced while its dict stays."""
    return list(chain.from_iterable(map(dict.values, states)))


def _same(one: Any, other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
