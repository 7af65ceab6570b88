"""The batches of the last step, kept for the next one.

Sorting a model's tensors into batches takes more host time than launching the kernels that update them.
Between two steps of a training loop only gradients move. So the batches of the last step are reused if
nothing else has changed. A cache that is out of date is dropped, never repaired.

The fused kernels read raw addresses. So before every step each tensor is checked: it must be the same object,
on the same device, with the same dtype, shape and strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, count
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from aida._step.group_rules import is_plain
from aida._step.hyper_cache import HyperCache
from aida._step.layers import Layers
from aida._step.sharding import GradientReader, is_dtensor
from aida.backends import Batch, cut
from aida.backends.choice import Route
from aida.backends.tables import PointerTable, match_memory_order, match_state_order, same_memory_order

_params = itemgetter("params")
_local = attrgetter("_local_tensor")
_generations = count()


def all_params(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return list(chain.from_iterable(map(_params, groups)))


class Share(NamedTuple):
    """The gradients that one batch gets."""

    batch: Batch
    wanted: list[bool] | None  #: mask over the gradients that are not None; None for all of them
    copied: bool  #: whether a gradient has another memory order than its parameter
    layers: list[Layers] | None  #: how to cut each gradient; None if there is nothing to cut


class BatchCache:
    """The batches of one step, and everything that must not change until they are reused."""

    def __init__(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        state: dict[Any, Any],
        hypers: HyperCache,
        batches: dict[Route, Batch],
    ) -> None:
        self._params = params
        self._present = [grad is not None for grad in grads]
        self._grad_types = {type(grad) for grad in grads if grad is not None}
        self._state_keys = list(state)
        self._state_values = list(state.values())
        # hooks may keep values that are not dicts beside the parameters' state
        self._state_dicts = [kept for kept in self._state_values if isinstance(kept, dict)]
        self._state_tensors = _contents(self._state_dicts)
        # a DTensor may get another local tensor, for example when a checkpoint is loaded into the model
        self._dtensors = [t for t in (*params, *self._state_tensors) if is_dtensor(t)]
        self._locals = list(map(_local, self._dtensors))
        self._hypers_generation, self._paths_generation = hypers.generation, hypers.paths_generation
        self._batches = batches
        present = list(compress(params, self._present))
        self._gradients = GradientReader(present) if self._dtensors else None
        self._shares = []
        for route, batch in batches.items():
            batch.generation, batch.values_generation = next(_generations), next(_generations)
            fused = route.kind == "fused"
            mine = {id(origin.param) for origin in batch.origins}  # two parameters may share a gradient
            # a single batch may lack parameters, of which this rank holds no layer
            wanted = None if len(mine) == len(present) else [id(p) in mine for p in present]
            layers = None if fused or batch.wholes is None else [origin.layers for origin in batch.origins]
            self._shares.append(Share(batch, wanted, _prepare(batch) if fused else False, layers))
        tensors = chain(*(chain(*batch.tensor_lists()) for batch in batches.values()))
        #: Whether the batches can be reused. Views of complex tensors cannot: every step makes new ones.
        self.may_be_kept = all(is_plain(t) for t in tensors) and not any(p.is_complex() for p in params)
        if self.may_be_kept:
            for batch in batches.values():
                if batch.table is None:
                    batch.table = PointerTable(batch)

    def recall(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        state: dict[Any, Any],
        hypers: HyperCache,
        redistributed: dict[int, Tensor],
    ) -> dict[Route, Batch] | None:
        """The batches with the gradients and values of this step, or None if anything else changed."""
        present = [grad for grad in grads if grad is not None]
        if not (
            hypers.paths_generation == self._paths_generation
            and _same(params, self._params)
            and _same(state, self._state_keys)
            and _same(state.values(), self._state_values)
            and _same(_contents(self._state_dicts), self._state_tensors)
            and (not self._dtensors or all(map(is_, map(_local, self._dtensors), self._locals)))
            and (len(present) == len(grads) or [grad is not None for grad in grads] == self._present)
            and len(present) == sum(self._present)
            and set(map(type, present)) == self._grad_types
        ):
            return None
        if self._gradients is not None:
            present = self._gradients.local(present, redistributed)
        if any(map(Tensor.is_neg, present)):
            return None
        for batch, wanted, copied, layers in self._shares:
            mine = present if wanted is None else list(compress(present, wanted))
            if not batch.table.look(mine):
                return None
            if copied:
                mine = match_memory_order((batch.wholes or batch).params, mine)
                batch.table.place_gradients(mine)
            batch.grads = mine if layers is None else cut(layers, mine)
            if hypers.generation != self._hypers_generation:
                batch.set_hypers(hypers.values, next(_generations))
            batch.grad_scale = batch.found_inf = None
        self._hypers_generation = hypers.generation
        return self._batches


def _prepare(batch: Batch) -> bool:
    """Bring all tensors of a parameter into one memory order, as the fused kernels need it.

    Returns whether gradients were copied for that.
    """
    whole = batch.wholes or batch
    match_state_order(whole)
    batch.table = PointerTable(batch)  # of the original gradients, with which the next ones are compared
    copied = any(
        grad.is_neg() or not same_memory_order(grad, p) for grad, p in zip(whole.grads, whole.params, strict=True)
    )
    if copied:
        batch.grads = match_memory_order(whole.params, whole.grads)
        batch.table.place_gradients(batch.grads)
    return copied


def _contents(states: list[dict[str, Any]]) -> list[Any]:
    """All values of all state dicts in one list: a value may be replaced while its dict stays the same."""
    return list(chain.from_iterable(map(dict.values, states)))


def _same(one: Any, other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
