"""The batches of the last step, kept for the next one.

Sorting a model's tensors into batches costs more host time than launching the kernels that update
them. Between two steps of a training loop only gradients move, so the batches of the last step serve
again if everything they rest on is the same. A cache that no longer holds is thrown away, never
repaired.

The fused kernels read bare addresses. So every tensor that they read is looked at before every step,
whether it still is what it was: the same object, on the same device, of the same dtype, shape and strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from aida._step.group_rules import is_plain
from aida._step.hyper import Hyper
from aida.backends import Batch
from aida.backends.choice import Route
from aida.backends.tables import TensorTable, keep_state_layout, lies_like, same_layout

_params = itemgetter("params")


def all_params(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return list(chain.from_iterable(map(_params, groups)))


class Share(NamedTuple):
    """What one batch gets of a step's gradients."""

    batch: Batch
    wanted: list[bool] | None  #: which of the present gradients; None for all
    copied: bool  #: whether a gradient lies in memory in another order than its parameter


class BatchCache:
    """The batches of one step, and what must not change for them to serve the next."""

    def __init__(
        self, params: list[Tensor], grads: list[Tensor | None], state: dict[Any, Any], batches: dict[Route, Batch]
    ) -> None:
        self._params = params
        self._present = [grad is not None for grad in grads]
        self._grad_types = {type(grad) for grad in grads if grad is not None}
        self._state_keys = list(state)
        self._state_values = list(state.values())
        # a hook may keep a number of its own beside the parameters' state
        self._state_dicts = [kept for kept in self._state_values if isinstance(kept, dict)]
        self._state_tensors = _contents(self._state_dicts)
        self._hypers: list[Hyper] | None = None
        self._batches = batches
        present = list(compress(params, self._present))
        self._shares = []
        for route, batch in batches.items():
            mine = set(map(id, batch.params))  # not of the gradients: two parameters may share one
            wanted = None if len(batches) == 1 else [id(p) in mine for p in present]
            self._shares.append(Share(batch, wanted, _prepare(batch) if route.kind == "fused" else False))
        tensors = chain(*(chain(*batch.tensor_lists()) for batch in batches.values()))
        #: Whether the batches can be kept: views of complex tensors are made anew at every step.
        self.may_be_kept = all(is_plain(t) for t in tensors) and not any(p.is_complex() for p in params)
        if self.may_be_kept:
            for batch in batches.values():
                if batch.table is None:
                    batch.table = TensorTable(batch)

    def recall(
        self, params: list[Tensor], grads: list[Tensor | None], state: dict[Any, Any], hypers: list[Hyper]
    ) -> dict[Route, Batch] | None:
        """The batches with this step's gradients and values; None if anything but those changed."""
        present = [grad for grad in grads if grad is not None]
        if not (
            _same(params, self._params)
            and _same(state, self._state_keys)
            and _same(state.values(), self._state_values)
            and _same(_contents(self._state_dicts), self._state_tensors)
            and (len(present) == len(grads) or [grad is not None for grad in grads] == self._present)
            and len(present) == sum(self._present)
            and set(map(type, present)) == self._grad_types
            and not any(map(Tensor.is_neg, present))
        ):
            return None
        for batch, wanted, copied in self._shares:
            batch.grads = present if wanted is None else list(compress(present, wanted))
            if not batch.table.look(batch.grads):
                return None
            if copied:
                batch.grads = same_layout(batch.params, batch.grads)
                batch.table.place_gradients(batch.grads)
            if hypers is not self._hypers:  # else the same list: what is known of it stays known
                batch.runs = [(hypers[group], count) for group, count in zip(batch.groups, batch.counts(), strict=True)]
            batch.grad_scale = batch.found_inf = None
        self._hypers = hypers
        return self._batches


def _prepare(batch: Batch) -> bool:
    """Make a batch fit for the fused kernels, which walk all tensors of a parameter in one order.

    Returns whether gradients had to be copied for that.
    """
    keep_state_layout(batch)
    batch.table = TensorTable(batch)  # of the gradients as they came: the next ones are compared with them
    copied = any(grad.is_neg() or not lies_like(grad, p) for grad, p in zip(batch.grads, batch.params, strict=True))
    if copied:
        batch.grads = same_layout(batch.params, batch.grads)
        batch.table.place_gradients(batch.grads)
    return copied


def _contents(states: list[dict[str, Any]]) -> list[Any]:
    """All that is kept for all parameters, as one list: an entry may be replaced while its dict stays."""
    return list(chain.from_iterable(map(dict.values, states)))


def _same(one: Any, other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
