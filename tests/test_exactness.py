"""Every path against the NumPy transcription of Algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from aida import Aida
from paths import NATIVE_PATHS, REFERENCE, Path, over_paths
from transcription import Transcription, Vector

STEPS = 50
PROJECTIONS = range(6)

#: With gradients of 0.01, eps is a visible part of the variance and the belief term after five
#: projections is too: neither can hide an error in the other.
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-10, "xi": 1e-20}

#: Odd sizes, a tail of one vector register, more than one chunk of any kernel, and every rank.
SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (2,),
    (7,),
    (1023,),
    (4097,),
    (33, 65),
    (10, 6, 5, 3),  # channels-last in memory
    (513, 257),  # crosses a bucket of the foreach path
)
LARGE = (1501, 2003)  # 3,006,503 elements
LARGE_PROJECTIONS = (2, 3)  # one even, one odd: 50 steps of this size take the transcription seconds
#: What Triton's interpreter gets through: one program of its kernels takes about 10 ms.
INTERPRETED_SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (4097,), (10, 6, 5, 3))
INTERPRETED_STEPS = 6
INTERPRETED_PROJECTIONS = (1, 2)


class Tolerance(NamedTuple):
    """Largest error a tensor may have, relative to the largest magnitude it had in any step."""

    theta: float
    exp_avg: float
    exp_avg_var: float


NOTHING = Tolerance(0.0, 0.0, 0.0)

#: Measured on every path over all shapes and projections, then rounded up. From float32 down the
#: moments are float32, so that their columns hardly differ: a mean carries one rounding (6e-8) of each
#: of its last ten steps (2.4e-7 measured); a variance carries those and the errors of the coefficients,
#: up to the eighth power of a cosine (4e-6). The foreach path sums 131,072 products in float32, and
#: products of numbers with few digits round all to one side: 3e-6 in |g|^2 for bf16 and fp16 gradients
#: against 3e-7 for float32 ones, hence 2e-5 in their variance. A float32 theta loses a rounding a step
#: (2e-6). A bf16 theta keeps 8 bits and an fp16 theta 11 and is rounded 50 times, by up to 2e-3 and
#: 2.4e-4 of its own magnitude each time (3e-2 and 3e-3): what is lost is in the weight, not in the state.
TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12, 1e-12),
    torch.float32: Tolerance(5e-6, 5e-7, 1e-5),
    torch.bfloat16: Tolerance(5e-2, 5e-7, 5e-5),
    torch.float16: Tolerance(5e-3, 5e-7, 5e-5),
}

#: Options that are not in Algorithm 1, as what they do to the gradient or the weights before it.
OPTIONS: dict[str, dict[str, Any]] = {
    "l2": {"weight_decay": 0.03, "decoupled_weight_decay": False},
    "decoupled": {"weight_decay": 0.3, "decoupled_weight_decay": True},
    "maximize": {"maximize": True},
    "clip": {"clip_norm": 0.3},
    "clip_out_of_reach": {"clip_norm": 1e6},
    "clip_l2_maximize": {"clip_norm": 0.3, "weight_decay": 0.03, "maximize": True, "decoupled_weight_decay": False},
    "large_xi": {"xi": 1e-4},
    "betas": {"betas": (0.5, 0.9)},
    "no_momentum": {"betas": (0.0, 0.0)},
}


@dataclass
class Watched(Transcription):
    """Remembers the largest magnitudes on its way: rounding errors are of that size, though it end near 0."""

    largest: Tolerance = NOTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        self._watch()

    def step(self, g: Vector) -> None:
        super().step(g)
        self._watch()

    def _watch(self) -> None:
        now = (float(max(np.max(x), -np.min(x))) for x in (self.theta, self.m, self.v))
        self.largest = Tolerance(*map(max, self.largest, now))


@cache
def _noise(shape: tuple[int, ...]) -> tuple[Vector, Vector, Vector]:
    rng = np.random.default_rng([len(shape), *shape])
    size = math.prod(shape)
    # a gradient is a window of one long noise: new at every step, without 50 draws of 3M numbers
    return rng.normal(size=size), rng.normal(size=size + 7 * STEPS), 0.1 * rng.normal(size=size)


def weights(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return _torch(_noise(shape)[2], shape, dtype)


def gradient(shape: tuple[int, ...], t: int, dtype: torch.dtype) -> Tensor:
    """A signal in noise that turns round for three steps in ten: cosines with its mean from -0.7 to 0.9."""
    signal, noise, _ = _noise(shape)
    sign = -1.0 if t % 10 in (3, 4, 5) else 1.0
    return _torch(0.01 * (sign * signal + 0.7 * noise[7 * t : 7 * t + signal.size]), shape, dtype)


def _torch(values: Vector, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(values).reshape(shape).to(dtype)
    return tensor.to(memory_format=torch.channels_last) if len(shape) == 4 else tensor


def _numpy(tensor: Tensor) -> Vector:
    return tensor.detach().to("cpu", torch.float64).numpy()


@cache
def transcript(shape: tuple[int, ...], projections: int, dtype: torch.dtype, steps: int) -> Watched:
    """Algorithm 1 after so many steps, from weights and gradients rounded to ``dtype``."""
    layer = Watched(_numpy(weights(shape, dtype)), projections=projections, **HYPER)
    for t in range(steps):
        layer.step(_numpy(gradient(shape, t, dtype)))
    return layer


def shapes_of(path: Path) -> tuple[tuple[int, ...], ...]:
    return INTERPRETED_SHAPES if path.interpreted else SHAPES


def steps_of(path: Path) -> int:
    return INTERPRETED_STEPS if path.interpreted else STEPS


def make_parameters(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, path: Path) -> list[Parameter]:
    return [Parameter(weights(shape, dtype).to(path.device, copy=True)) for shape in shapes]


def run(optimizer: Aida, params: list[Parameter], shapes: Iterable[tuple[int, ...]], path: Path) -> None:
    shapes = list(shapes)
    for t in range(steps_of(path)):
        for p, shape in zip(params, shapes, strict=True):
            p.grad = gradient(shape, t, p.dtype).to(path.device)
        optimizer.step()


def errors(optimizer: Aida, p: Parameter, right: Watched) -> Tolerance:
    state = optimizer.state[p]
    found = (p, state["exp_avg"], state["exp_avg_var"])
    differences = (np.abs(_numpy(x) - y) for x, y in zip(found, (right.theta, right.m, right.v), strict=True))
    return Tolerance(*(float(np.max(d)) / scale for d, scale in zip(differences, right.largest, strict=True)))


def assert_exact(optimizer: Aida, p: Parameter, right: Watched, tolerance: Tolerance) -> None:
    assert float(optimizer.state[p]["step"]) == right.t
    found = errors(optimizer, p, right)
    assert all(error <= allowed for error, allowed in zip(found, tolerance, strict=True)), (
        f"shape {tuple(p.shape)}, {right.projections} projections, {p.dtype}: {found} exceeds {tolerance}"
    )


@over_paths()
def test_each_path_is_the_one_it_names(path: Path) -> None:
    params = make_parameters([(7,)], torch.float64, path)
    optimizer = path.make(params, **HYPER)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert {type(backend) for backend in optimizer._backends.values()} == {path.backend}


@over_paths()
@pytest.mark.parametrize("projections", PROJECTIONS)
def test_float64_is_algorithm_1(path: Path, projections: int) -> None:
    shapes = shapes_of(path)
    params = make_parameters(shapes, torch.float64, path)
    optimizer = path.make(params, projections=projections, **HYPER)
    run(optimizer, params, shapes, path)
    for p, shape in zip(params, shapes, strict=True):
        right = transcript(shape, projections, torch.float64, steps_of(path))
        assert_exact(optimizer, p, right, TOLERANCES[torch.float64])


@over_paths(NATIVE_PATHS)
def test_three_million_elements_are_algorithm_1(path: Path) -> None:
    in_groups = LARGE_PROJECTIONS[:1] if path.flags is REFERENCE else LARGE_PROJECTIONS  # it takes seconds, too
    params = {projections: make_parameters([LARGE], torch.float64, path) for projections in in_groups}
    groups = [{"params": tensors, "projections": projections} for projections, tensors in params.items()]
    optimizer = path.make(groups, **HYPER)
    run(optimizer, [p for tensors in params.values() for p in tensors], [LARGE] * len(params), path)
    for projections, (p,) in params.items():
        assert_exact(optimizer, p, transcript(LARGE, projections, torch.float64, STEPS), TOLERANCES[torch.float64])


@over_paths()
@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_each_dtype_keeps_its_tolerance_and_each_group_its_projections(path: Path, dtype: torch.dtype) -> None:
    shapes = shapes_of(path)
    in_groups = INTERPRETED_PROJECTIONS if path.interpreted else PROJECTIONS
    params = {projections: make_parameters(shapes, dtype, path) for projections in in_groups}
    groups = [{"params": tensors, "projections": projections} for projections, tensors in params.items()]
    optimizer = path.make(groups, **HYPER)
    run(optimizer, [p for tensors in params.values() for p in tensors], shapes * len(params), path)
    for projections, tensors in params.items():
        for p, shape in zip(tensors, shapes, strict=True):
            assert_exact(optimizer, p, transcript(shape, projections, dtype, steps_of(path)), TOLERANCES[dtype])


@over_paths()
@pytest.mark.parametrize("option", OPTIONS)
def test_options_are_changes_of_the_gradient_or_the_weights(path: Path, option: str) -> None:
    shapes = shapes_of(path)
    values = {**HYPER, **OPTIONS[option]}
    params = make_parameters(shapes, torch.float64, path)
    optimizer = path.make(params, **values)
    run(optimizer, params, shapes, path)
    for p, layer in zip(params, transcribe_options(shapes, steps_of(path), values), strict=True):
        assert_exact(optimizer, p, layer, TOLERANCES[torch.float64])


def transcribe_options(shapes: tuple[tuple[int, ...], ...], steps: int, values: dict[str, Any]) -> list[Watched]:
    """Algorithm 1 on gradients that were clipped, turned round and decayed before it sees them."""
    layers = [Watched(_numpy(weights(shape, torch.float64)), **{key: values[key] for key in HYPER}) for shape in shapes]
    decay, decoupled = values.get("weight_decay", 0.0), values.get("decoupled_weight_decay", True)
    for t in range(steps):
        grads = [_numpy(gradient(shape, t, torch.float64)) for shape in shapes]
        norm = math.sqrt(sum(float(np.sum(g * g)) for g in grads))
        scale = min(1.0, values.get("clip_norm", math.inf) / (norm + 1e-6))  # clip_grad_norm_ adds this 1e-6
        scale = -scale if values.get("maximize") else scale
        for layer, g in zip(layers, grads, strict=True):
            if decoupled:
                layer.theta = layer.theta * (1 - layer.lr * decay)
            layer.step(scale * g + (0.0 if decoupled else decay) * layer.theta)
    return layers


@over_paths()
def test_a_gradient_in_another_memory_order_changes_nothing(path: Path) -> None:
    shape = (10, 6, 5, 3)
    params = make_parameters([shape], torch.float64, path)
    optimizer = path.make(params, **HYPER)
    for t in range(steps_of(path)):
        params[0].grad = gradient(shape, t, torch.float64).contiguous().to(path.device)
        optimizer.step()
    assert_exact(optimizer, params[0], transcript(shape, 2, torch.float64, steps_of(path)), TOLERANCES[torch.float64])
