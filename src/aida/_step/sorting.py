"""From parameter groups to batches: which tensors are updated together, and with which other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from aida._step.group_rules import STATE_DTYPES, is_uninitialized
from aida._step.hyper import Hyper
from aida._step.layers import ONE_LAYER, layers_of
from aida._step.sharding import is_dtensor, span_of
from aida._step.storage import FULL, NO_STREAM, storage_of, stream_of
from aida.backends import Batch, Origin
from aida.backends.choice import Route, distribute
from aida.backends.exchange import Exchange
from aida.backends.tables import match_state_order

#: Fills the six lists of a batch with a group's local tensors, and returns whether any is complex.
InitGroup = Callable[..., bool]


def sort(
    groups: list[dict[str, Any]], hypers: list[Hyper], init_group: InitGroup, first_number: int
) -> tuple[dict[Route, Batch], list[Exchange]]:
    """The batches of a step, and the exchanges that this rank takes part in, whether or not it has gradients."""
    batches: dict[Route, Batch] = {}
    exchanges: dict[tuple[int, ...], Exchange] = {}
    numbers = count(first_number)  # of all parameters
    for index, (group, hyper) in enumerate(zip(groups, hypers, strict=True)):
        found = Batch()
        has_complex = init_group(group, *found.rows())
        found.origins += _origins(group, hyper, exchanges, numbers)
        if has_complex:
            match_state_order(found)  # before the views: a view cannot change its memory format
            found.view_as_real()
        distribute(found, index, group, hyper, batches)
    for exchange in exchanges.values():
        exchange.close()
    for route, batch in batches.items():
        batch.exchange = exchanges.get(route.ranks)
        batch.dtensors = [origin.param for origin in batch.origins if is_dtensor(origin.param)]
    by_layer = {route: _by_layer(batch) for route, batch in batches.items()}
    # a rank may have gradients of stacked layers, and none of the layers
    return {route: batch for route, batch in by_layer.items() if len(batch)}, list(exchanges.values())


def _origins(
    group: dict[str, Any], hyper: Hyper, exchanges: dict[tuple[int, ...], Exchange], numbers: Iterator[int]
) -> list[Origin]:
    """The origins of the group's tensors that have a gradient. Reserves slots for all of them, on every rank."""
    found = []
    for p, number in zip(group["params"], numbers, strict=False):
        if is_uninitialized(p) or not (p.requires_grad or p.grad is not None):
            continue
        layers, span, slot = layers_of(p, group), span_of(p), 0
        if span is not None:
            if group["differentiable"]:
                raise RuntimeError("differentiable=True does not work with sharded parameters; use plain tensors")
            if span.ranks not in exchanges:
                exchanges[span.ranks] = Exchange(p, span)
            slot = exchanges[span.ranks].reserve(p, layers, hyper, STATE_DTYPES[p.dtype])
        if p.grad is not None:
            storage = storage_of(p, group, layers)
            stream = NO_STREAM if storage == FULL else stream_of(p, number, group["rounding_seed"])
            found.append(Origin(p, layers, span, slot, storage, stream))
    return found


def _by_layer(batch: Batch) -> Batch:
    if all(origin.layers is ONE_LAYER for origin in batch.origins):
        return batch
    match_state_order(batch)
    return batch.by_layer()
