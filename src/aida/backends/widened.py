"""Any of the plain paths on state that is stored in fewer bits: slow, and what the tests compare the kernels with.

Every step copies the state to float32, updates the copy and rounds it back. So this path needs temporaries of the size
of the model, which the kernels do not.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aida.backends import Backend, Batch, Reduced, cut
from aida.rounding import block_scales, decoded, encode, flat, random_word, random_words, to_bfloat16, to_float16
from aida.rule import eps_share


class _Reduced(NamedTuple):
    """What the wrapped path returned, and the batch of float32 copies that it was given."""

    inner: Any
    wide: Batch

    @property
    def squared_norm(self) -> Tensor | None:
        return self.inner.squared_norm  # type: ignore[no-any-return]

    @property
    def sums(self) -> Tensor:
        return self.inner.sums  # type: ignore[no-any-return]

    @property
    def finite(self) -> Tensor:
        return self.inner.finite  # type: ignore[no-any-return]

    def nonfinite(self) -> list[int]:
        return self.inner.nonfinite()  # type: ignore[no-any-return]


class Widened:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def reduce(self, batch: Batch) -> Reduced:
        wide = Batch(
            list(map(partial(_wide_param, batch), batch.params, batch.compensations)), batch.grads,
            list(map(_wide, batch.exp_avgs, batch.exp_avg_scales)),
            list(map(_wide, batch.exp_avg_vars, batch.exp_avg_var_scales)), batch.steps, batch.skipped,
            runs=batch.runs, groups=batch.groups, exchange=batch.exchange, may_abort=batch.may_abort,
            grad_scale=batch.grad_scale, found_inf=batch.found_inf,
        )  # fmt: skip
        if batch.storage.state == "fp8":
            for root, share in zip(wide.exp_avg_vars, _eps_shares(batch), strict=True):
                root.square_().add_(share)
        return _Reduced(self._backend.reduce(wide), wide)

    def apply(self, batch: Batch, reduced: _Reduced, squared_norm: Tensor | None) -> None:
        wide = reduced.wide
        wide.found_inf = batch.found_inf
        before = [step.clone() for step in batch.steps]
        self._backend.apply(wide, reduced.inner, squared_norm)
        if batch.storage.state == "fp8":
            for v, share in zip(wide.exp_avg_vars, _eps_shares(batch), strict=True):
                v.sub_(share).clamp_(min=0)
        for i, (positions, stream) in enumerate(zip(_positions(batch), batch.streams(), strict=True)):
            changed = batch.steps[i] != before[i]
            if batch.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(changed):
                continue  # elsewhere a branch on a value would synchronize with the device
            place = (stream.seed, batch.steps[i], positions)
            words = random_words(*place) if batch.storage.rounding == "stochastic" else (random_word(*place),)
            _store(batch, wide, i, changed, words)


def _store(batch: Batch, wide: Batch, i: int, changed: Tensor, words: tuple[Tensor, ...]) -> None:
    """Round the float32 copies of one tensor back, where ``changed``: state by the first word."""

    def put(target: Tensor, value: Tensor) -> None:
        target.copy_(torch.where(changed, value, target))

    low, high = words[0] & 0xFFFF, words[0] >> 16
    state, rounding = batch.storage
    m, v = wide.exp_avgs[i], wide.exp_avg_vars[i]
    if state == "bfloat16":
        put(batch.exp_avgs[i], to_bfloat16(m, low))
        put(batch.exp_avg_vars[i], to_bfloat16(v, high))
    elif state == "fp8":
        for codes, scales, new, bits in (
            (batch.exp_avgs[i], batch.exp_avg_scales[i], m, low),
            (batch.exp_avg_vars[i], batch.exp_avg_var_scales[i], v.sqrt(), high),
        ):
            new_scales = block_scales(flat(new))
            put(flat(codes), encode(flat(new), new_scales, flat(bits)))
            put(scales.view(-1), new_scales)

    p, theta = batch.params[i], wide.params[i]
    if rounding == "stochastic":
        put(p, (to_bfloat16 if p.dtype == torch.bfloat16 else to_float16)(theta, words[1] & 0xFFFF))
    elif rounding == "kahan":
        rounded = theta.to(p.dtype)
        # at a tie the old value stays, so that an update of zero changes nothing
        rounded = torch.where((theta - p).abs() <= (theta - rounded).abs(), p, rounded)
        put(batch.compensations[i], (theta - rounded).to(p.dtype))
        put(p, rounded)


def _eps_shares(batch: Batch) -> list[Tensor]:
    """What eps has added to the second moment of each tensor, which 8-bit codes leave out."""
    found = []
    for hyper, where in batch.slices():
        found += [eps_share(hyper.eps, hyper.beta2, step).float() for step in batch.steps[where]]
    return found


def _wide_param(batch: Batch, p: Tensor, compensation: Tensor | None) -> Tensor:
    if batch.storage.rounding == "nearest":
        return p
    return p.float() if compensation is None else p.float() + compensation


def _wide(moment: Tensor, scales: Tensor | None) -> Tensor:
    """A moment in float32, in the same memory order: itself, or a copy."""
    if moment.dtype == torch.float32:
        return moment
    return torch.empty_like(moment, dtype=torch.float32).copy_(moment) if scales is None else decoded(moment, scales)


def _positions(batch: Batch) -> list[Tensor]:
    """The positions of each tensor's elements, which choose their random bits."""
    whole = batch.wholes or batch
    found = []
    for moment, stream in zip(whole.exp_avgs, whole.streams(), strict=True):
        positions = torch.empty_like(moment, dtype=torch.int64)
        flat(positions).copy_(stream.positions(moment.numel(), moment.device))
        found.append(positions)
    return found if batch.wholes is None else cut([origin.layers for origin in batch.origins], found)
