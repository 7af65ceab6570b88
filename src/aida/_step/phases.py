"""One update of all batches: reduce, exchange with other ranks, apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from aida._step.layers import layer_label
from aida.backends import Backend, Batch, Reduced, sum_over_devices
from aida.backends.exchange import Exchange, NormGroup, add_over_ranks
from aida.backends.tables import note_write

#: Maps a parameter to its name in error messages.
Label = Callable[[Tensor], str]


class Part(NamedTuple):
    """A batch between the two phases."""

    backend: Backend
    batch: Batch
    reduced: Reduced


def update(
    work: Sequence[tuple[Backend, Batch]],
    exchanges: Sequence[Exchange],
    label: Label,
    norm_group: NormGroup | None = None,
) -> None:
    raises = False
    for _, batch in work:
        raises = raises or batch.traits.raises
    for exchange in exchanges:
        raises = raises or exchange.raises
    for _, batch in work:
        batch.may_abort = raises
    if exchanges or norm_group is not None or raises:
        _update_together(work, exchanges, label, norm_group, raises)
        return
    reduced = [backend.reduce(batch) for backend, batch in work]
    norms = sum_over_devices([found.squared_norm for found in reduced], [batch for _, batch in work])
    for (backend, batch), found, norm in zip(work, reduced, norms, strict=True):
        _apply(backend, batch, found, norm)


def _apply(backend: Backend, batch: Batch, reduced: Reduced, squared_norm: Tensor | None) -> None:
    backend.apply(batch, reduced, squared_norm)
    if batch.dtensors:
        note_write(batch.dtensors)  # only their local tensors were written to


def _update_together(
    work: Sequence[tuple[Backend, Batch]],
    exchanges: Sequence[Exchange],
    label: Label,
    norm_group: NormGroup | None,
    raises: bool,
) -> None:
    """An update with other ranks, or one that may raise."""
    found_inf = next((batch.found_inf for _, batch in work), None)

    # reduce, first what other ranks wait for
    parts = [Part(backend, batch, backend.reduce(batch)) for backend, batch in work if batch.exchange is not None]
    for exchange in exchanges:
        mine = [(batch, found) for _, batch, found in parts if batch.exchange is exchange]
        exchange.start(mine, found_inf)
        if found_inf is not None:
            # one exchange after another, because a rank must pass on what it has learned to its other ranks
            exchange.finish(mine)
            found_inf = found_inf + exchange.found_inf.to(found_inf)
    for backend, batch in work:
        if batch.exchange is None:
            found = backend.reduce(batch)
            if exchanges and not (batch.traits.clips or raises or found_inf is not None):
                _apply(backend, batch, found, None)  # depends on no other rank
            else:
                parts.append(Part(backend, batch, found))

    # exchange
    for exchange in exchanges if found_inf is None else ():
        exchange.finish([(batch, found) for _, batch, found in parts if batch.exchange is exchange])
    wrong = _nonfinite(parts, exchanges, label) if raises else []
    norms = [part.reduced.squared_norm for part in parts]
    grad_scale = next((batch.grad_scale for _, batch in work), None)
    shared = [exchange.squared_norm(grad_scale) for exchange in exchanges]
    if norm_group is not None:
        squares = sum(norm.to(norm_group.device) for norm in (*norms, *shared) if norm is not None)
        squared, inf, bad = add_over_ranks(norm_group, (squares, 0 if found_inf is None else found_inf, len(wrong)))
        norms, shared = [None] * len(parts), [squared]
        found_inf = None if found_inf is None else inf.to(found_inf)
        if raises and not wrong and bool(bad != 0):
            wrong = ["a parameter on another rank of norm_group"]
    # if GradScaler found NaN or inf on any rank, it skips this step
    if wrong and not (found_inf is not None and bool(found_inf != 0)):
        raise RuntimeError(
            f"the gradient of {', '.join(wrong[:8])}{' and others' if len(wrong) > 8 else ''} holds NaN or inf;"
            ' nothing was changed. Check the loss and the learning rate, or set nonfinite="skip" to skip such'
            " tensors"
        )
    totals = sum_over_devices(norms, [part.batch for part in parts], shared)

    # apply
    for (backend, batch, reduced), squared_norm in zip(parts, totals, strict=True):
        batch.found_inf = None if found_inf is None else found_inf.to(batch.device)
        _apply(backend, batch, reduced, squared_norm)


def _nonfinite(parts: Iterable[Part], exchanges: Iterable[Exchange], label: Label) -> list[str]:
    """The names of the layers whose gradient must not hold NaN or inf and does. Synchronizes with the device."""
    names = []
    for _, batch, reduced in parts:
        if not batch.traits.raises or batch.exchange is not None:
            continue
        bad, origins = set(reduced.nonfinite()), batch.layer_origins()
        for hyper, where in batch.slices():
            if hyper.nonfinite == "raise":
                wrong = [origins[i] for i in range(where.start, where.stop) if i in bad]
                names += [layer_label(label(origin.param), origin.layers, number) for origin, number in wrong]
    for exchange in exchanges:
        names += [layer_label(label(slot.param), slot.layers, slot.number) for slot in exchange.nonfinite()]
    return names
