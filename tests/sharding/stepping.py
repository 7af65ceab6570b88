"""Steps on sharded parameters, compared with the same steps of one process on whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from aida import Aida
from layouts import Layout, shard_gap
from paths import FOREACH, FUSED, REFERENCE, InterpretedAida

#: Uneven and empty shards, a scalar, a vector, and a tensor with three dimensions.
SHAPES: tuple[tuple[int, ...], ...] = ((7, 5), (1, 3), (8, 6), (), (9,), (3, 4, 2))
#: With whole 8-bit blocks on every rank of every layout, but for a vector that is too small for them.
BLOCK_SHAPES: tuple[tuple[int, ...], ...] = ((16, 1024), (8, 512, 8), (9,))
STEPS = 3
BAD_STEP = 1  #: in which the gradient of the first parameter holds NaN
FLAGS = {"fused": FUSED, "foreach": FOREACH, "reference": REFERENCE, "interpreted": {}}
STORAGES: dict[str, dict[str, Any]] = {
    "": {},
    "fp8": {"state_precision": "fp8"},
    "bf16": {"state_precision": "bfloat16", "rounding_seed": 7},
    "stochastic fp8": {"state_precision": "fp8", "stochastic_rounding": True},
    "kahan": {"kahan_sum": True},
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "complex64": torch.complex64}


@dataclass(frozen=True)
class Case:
    """The options of one comparison."""

    path: str = "fused"
    dtype: str = "float32"
    clip: bool = False
    l2: bool = False
    projections: int = 2
    bad: str = ""  #: "shard": NaN in one element; "replica": the same in one replica only; "inf": as replica, with inf
    nonfinite: str = "skip"
    grads: str = "fitting"  #: how gradients are laid out: Layout.lay_as
    missing: bool = False  #: whether the last parameter has no gradient
    device: str = "cpu"
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    storage: str = ""

    def __str__(self) -> str:
        words = [self.path, self.dtype, f"K={self.projections}", self.grads, self.storage]
        words += [word for word in ("clip", "l2", "missing") if getattr(self, word)]
        return " ".join([*words, f"{self.bad} {self.nonfinite}"] if self.bad else words)

    @property
    def limit(self) -> float:
        """The largest :func:`layouts.gap` from one process."""
        if self.dtype == "float64":
            return 1e-12
        # on shards the reference path uses the closed form of the projections, on whole tensors the literal loop
        return 0.0 if self.path != "reference" else 1e-6 if self.dtype != "bf16" else 8e-3

    @property
    def whole(self) -> Case:
        """The case of one process that this one is compared with."""
        return replace(self, grads="fitting", bad="shard" if self.bad == "replica" else self.bad)

    def optimizer(self, params: Any, **values: Any) -> Aida:
        kind = InterpretedAida if self.path == "interpreted" else Aida
        options: dict[str, Any] = {
            "lr": 1e-2, "eps": 1e-10, "weight_decay": 0.1, "decoupled_weight_decay": not self.l2,
            "projections": self.projections, "clip_norm": 0.7 if self.clip else None, "nonfinite": self.nonfinite,
        }  # fmt: skip
        return kind(params, **{**options, **FLAGS[self.path], **STORAGES[self.storage], **values})

    def poison(self, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = float("inf" if self.bad == "inf" else "nan")
        return grad


def matrix(**choices: Iterable[Any]) -> Iterator[Case]:
    """The cases of all combinations."""
    for values in product(*choices.values()):
        yield Case(**dict(zip(choices, values, strict=True)))


SWITCH = (False, True)
CLIP_L2_K = {"clip": SWITCH, "l2": SWITCH, "projections": (1, 2)}
BAD = (("shard", "skip"), ("shard", "raise"), ("shard", "propagate"), ("replica", "skip"), ("replica", "raise"),
       ("inf", "skip"))  # fmt: skip


def quick_cases() -> list[Case]:
    """A part of all cases, in which every two options of one case meet."""
    found = []
    for clip, l2, projections in product(SWITCH, SWITCH, (1, 2)):
        even = (clip + l2 + projections) % 2 == 0
        found.append(Case("fused" if even else "foreach", clip=clip, l2=l2, projections=projections))
    found += [Case("reference", l2=True), Case("reference", clip=True), Case("reference", "bf16", clip=True, l2=True)]
    found += [Case("fused", "float64", clip=True, l2=True), Case("foreach", "float64"), Case("reference", "float64")]
    found += [Case("fused", "bf16", l2=True), Case("foreach", "bf16", clip=True), Case("fused", "complex64", clip=True)]
    for i, (bad, nonfinite) in enumerate(BAD):
        found.append(Case(("fused", "foreach")[i % 2], clip=i >= 2, bad=bad, nonfinite=nonfinite))
    for dtype, storage in (("float32", "fp8"), ("float32", "bf16"), ("bf16", "stochastic fp8"), ("bf16", "kahan")):
        path = "foreach" if storage == "kahan" else "fused"
        found.append(Case(path, dtype, clip=storage == "fp8", shapes=BLOCK_SHAPES, storage=storage))
    found += [Case(grads="replicate"), Case("foreach", grads="partial"), Case(grads="pending", missing=True, clip=True)]
    return found


def all_cases() -> list[Case]:
    paths, dtypes = ("fused", "foreach", "reference"), tuple(DTYPES)
    found = list(matrix(path=paths, dtype=dtypes, **CLIP_L2_K))
    for bad, nonfinite in BAD:
        found += matrix(path=paths, dtype=dtypes, **CLIP_L2_K, bad=(bad,), nonfinite=(nonfinite,))
    others = ("replicate", "partial", "pending")
    found += matrix(path=paths, dtype=dtypes, clip=SWITCH, l2=SWITCH, grads=others, missing=SWITCH)
    return found


def values_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    return [_random(shape, dtype, 1000 + i) for i, shape in enumerate(shapes)]


@cache
def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    precise = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=precise, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient(shape: tuple[int, ...], dtype: torch.dtype, step: int, index: int) -> Tensor:
    return _random(shape, dtype, 17 * step + index)


@dataclass(frozen=True)
class Whole:
    """What one process has after the steps of a case."""

    params: list[Tensor]
    state: list[dict[str, Tensor]]
    raised: list[int]  #: the steps that raised
    skipped: dict[str, int]


@cache
def one_process(case: Case, shapes: tuple[tuple[int, ...], ...]) -> Whole:
    dtype = DTYPES[case.dtype]
    params = [nn.Parameter(t.to(case.device, copy=True)) for t in values_of(shapes, dtype)]
    optimizer = case.optimizer(params)

    def set_gradients(step: int) -> None:
        for i, p in enumerate(params):
            grad = gradient(tuple(p.shape), dtype, step, i).to(case.device)
            bad = case.bad and step == BAD_STEP and i == 0
            p.grad = None if case.missing and i == len(params) - 1 else case.poison(grad) if bad else grad.clone()

    raised = take_steps(optimizer, set_gradients)
    return Whole(params, [optimizer.state[p] for p in params], raised, dict(optimizer.skipped()))


def take_steps(optimizer: Aida, set_gradients: Callable[[int], None]) -> list[int]:
    """Returns the steps that raised because of NaN or inf."""
    raised = []
    for step in range(STEPS):
        set_gradients(step)
        try:
            optimizer.step()
        except RuntimeError as error:
            if "holds NaN or inf" not in str(error):
                raise
            raised.append(step)
    return raised


def sharded_gap(case: Case, layouts: Sequence[Layout | None]) -> float:
    """The largest gap on this rank after the steps of a case; tensors take the layouts in turn.

    None is a plain tensor.
    """
    dtype = DTYPES[case.dtype]
    pairs = [(shape, layouts[i % len(layouts)]) for i, shape in enumerate(case.shapes)]
    shapes = tuple(shape for shape, layout in pairs if layout is None or layout.fits(shape))
    places = [layout for shape, layout in pairs if layout is None or layout.fits(shape)]
    whole = one_process(case.whole, shapes)
    start = [t.to(case.device) for t in values_of(shapes, dtype)]
    params = [nn.Parameter(t.clone() if at is None else at.lay(t)) for t, at in zip(start, places, strict=True)]
    optimizer = case.optimizer(params)

    def set_gradients(step: int) -> None:
        for i, (p, layout) in enumerate(zip(params, places, strict=True)):
            grad = gradient(tuple(p.shape), dtype, step, i).to(case.device)
            here = case.bad in ("shard", "inf") or layout is None or layout.is_last_replica
            if case.bad and step == BAD_STEP and i == 0 and here:
                grad = case.poison(grad)
            p.grad = grad.clone() if layout is None else layout.lay_as(case.grads, grad)
            if case.missing and i == len(params) - 1:
                p.grad = None

    raised = take_steps(optimizer, set_gradients)
    gaps = [0.0 if raised == whole.raised and optimizer.skipped() == whole.skipped else float("inf")]
    for p, other, state, layout in zip(params, whole.params, whole.state, places, strict=True):
        gaps.append(shard_gap(layout, p.data, other.data))
        for name, value in state.items():
            gaps.append(shard_gap(layout, optimizer.state[p][name], value))
    return max(gaps)


def wrong_cases(cases: Sequence[Case], layouts: Sequence[Layout | None]) -> dict[str, float]:
    """The cases whose gap on this rank is too large, with the gap. Errors end the work of all ranks."""
    gaps = {str(case): (sharded_gap(case, layouts), case.limit) for case in cases}
    return {name: found for name, (found, limit) in gaps.items() if not found <= limit}
