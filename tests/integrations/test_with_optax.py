"""optax: Aida in JAX against the float64 transcription of Algorithm 1, and in optax's and JAX's own tools."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aida as torch_aida
from test_exactness import (
    HYPER,
    NOTHING,
    PROJECTIONS,
    TOLERANCES,
    Tolerance,
    Watched,
    gradient,
    transcribe_options,
    transcript,
    weights,
)

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

from aida.integrations.optax import STATIC_ARGS, aida, scale_by_aida  # noqa: E402

pytestmark = pytest.mark.integrations
jax.config.update("jax_num_cpu_devices", 4)  # for sharded arrays; has to precede the first operation

STEPS = 30
SHAPES: tuple[tuple[int, ...], ...] = ((), (4097,), (10, 6, 5, 3))

#: What happens to the gradient or the weights before Algorithm 1.
OPTIONS: dict[str, dict[str, Any]] = {
    "l2": {"weight_decay": 0.03, "decoupled_weight_decay": False},
    "decoupled": {"weight_decay": 0.3},
    "clip": {"clip_norm": 0.3},
    "clip_l2": {"clip_norm": 0.3, "weight_decay": 0.03, "decoupled_weight_decay": False},
    "clip_decoupled": {"clip_norm": 0.3, "weight_decay": 0.3},
    "large_xi": {"xi": 1e-4},
    "no_momentum": {"betas": (0.0, 0.0)},
}


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def array(tensor: torch.Tensor) -> Any:
    return jnp.asarray(tensor.double().numpy(), dtype=str(tensor.dtype).removeprefix("torch."))


def parameters(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Any]:
    return [array(weights(shape, dtype)) for shape in shapes]


def gradients(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...] = SHAPES, steps: int = STEPS) -> list[Any]:
    """For every leaf the gradients of all steps."""
    return [array(torch.stack([gradient(shape, t, dtype) for t in range(steps)])) for shape in shapes]


@partial(jax.jit, static_argnums=0)
def scanned(optimizer: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    """The weights and the state after one step per gradient."""

    def step(carry: Any, grad: Any) -> tuple[Any, None]:
        params, state = carry
        updates, state = optimizer.update(grad, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), grads)[0]


def trained(optimizer: Any, params: Any, grads: Any) -> tuple[Any, Any]:
    return scanned(optimizer, params, optimizer.init(params), grads)


def gap(some: Any, others: Any) -> float:
    pairs = zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
    return max(float(np.max(np.abs(np.float64(a) - np.float64(b)))) for a, b in pairs)


def worst(params: list[Any], state: Any, layers: list[Watched]) -> Tolerance:
    """The largest errors of any leaf, relative to the largest magnitudes on the way."""
    found = NOTHING
    for theta, m, v, right in zip(params, state.mu, state.nu, layers, strict=True):
        pairs = zip((theta, m, v), (right.theta, right.m, right.v), right.largest, strict=True)
        found = Tolerance(*map(max, found, (gap(x, y) / scale for x, y, scale in pairs)))
    return found


def assert_within(found: Tolerance, allowed: Tolerance) -> None:
    assert all(error <= limit for error, limit in zip(found, allowed, strict=True)), f"{found} exceeds {allowed}"


# -- exact -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_dtype_is_algorithm_1_within_the_tolerance_of_the_torch_paths(dtype: torch.dtype) -> None:
    found = NOTHING
    with jax.enable_x64(dtype == torch.float64):
        for projections in PROJECTIONS if dtype == torch.float64 else (0, 2, 5):  # each is compiled: seconds
            params, state = trained(aida(**HYPER, projections=projections), parameters(dtype), gradients(dtype))
            layers = [transcript(shape, projections, dtype, STEPS) for shape in SHAPES]
            found = Tolerance(*map(max, found, worst(params, state[0], layers)))
            assert np.all(state[0].count == STEPS)
            wide = "float64" if dtype == torch.float64 else "float32"
            assert {leaf.dtype for leaf in (*state[0].mu, *state[0].nu)} == {jnp.dtype(wide)}
    print(dtype, *(f"{error:.1e}" for error in found))  # for docs/integrations.md
    assert_within(found, TOLERANCES[dtype])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("option", OPTIONS)
def test_options_are_changes_of_the_gradient_or_the_weights(option: str) -> None:
    dtype, values = torch.float64, {**HYPER, **OPTIONS[option]}
    params, state = trained(aida(**values), parameters(dtype), gradients(dtype))
    assert_within(worst(params, state[0], transcribe_options(SHAPES, STEPS, values)), TOLERANCES[dtype])


def test_names_and_defaults_are_those_of_the_torch_class() -> None:
    torchs = inspect.signature(torch_aida.Aida).parameters
    ours = {key: value.default for key, value in inspect.signature(aida).parameters.items() if key != "mask"}
    assert ours == {key: torchs[key].default for key in ours}
    core = {key: value.default for key, value in inspect.signature(scale_by_aida).parameters.items() if key != "mask"}
    assert {"lr": 1e-3, **core} == ours


# -- gradients that cannot be used -------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_steps_with_nan_are_those_of_the_torch_class(clip_norm: float | None) -> None:
    values = {**HYPER, "weight_decay": 0.3, "clip_norm": clip_norm}
    shapes, steps = ((7,), (33, 65)), 6
    grads = gradients(torch.float64, shapes, steps)
    grads[0] = grads[0].at[2, 3].set(jnp.nan)
    grads[1] = grads[1].at[0, 1, 1].set(jnp.inf)
    params, state = trained(aida(**values), parameters(torch.float64, shapes), grads)

    tensors = [torch.nn.Parameter(weights(shape, torch.float64).clone()) for shape in shapes]
    optimizer = torch_aida.Aida(tensors, **values)
    for t in range(steps):
        for p, g in zip(tensors, grads, strict=True):
            p.grad = torch.tensor(np.array(g[t]))
        optimizer.step()
    assert gap(params, [p.detach().numpy() for p in tensors]) <= 1e-12
    assert gap(state[0].nu, [optimizer.state[p]["exp_avg_var"].numpy() for p in tensors]) <= 1e-12
    assert state[0].skipped.tolist() == [1, 1] == list(optimizer.skipped().values())
    assert state[0].count.tolist() == [steps - 1, steps - 1]


def test_propagate_makes_the_leaf_nan() -> None:
    grads = [jnp.array([[0.1, jnp.nan]]), jnp.array([[0.1]])]
    params, _ = trained(aida(nonfinite="propagate"), [jnp.ones(2), jnp.ones(1)], grads)
    assert jnp.isnan(params[0]).all()
    assert jnp.isfinite(params[1]).all()


def test_a_leaf_without_gradient_keeps_its_weights_and_its_count() -> None:
    optimizer, params = aida(weight_decay=0.1), {"a": jnp.ones(2), "b": jnp.ones(3)}
    updates, state = optimizer.update({"a": jnp.ones(2), "b": None}, optimizer.init(params), params)
    assert updates["b"] is None
    assert state[0].count.tolist() == [1, 0]


# -- layers and decay of single leaves ---------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_layer_dims_makes_every_matrix_of_a_stack_a_layer() -> None:
    (stack,), (grads,) = parameters(torch.float64, ((3, 6, 5),)), gradients(torch.float64, ((3, 6, 5),))
    grads = grads.at[3, 2, 1].set(jnp.nan)  # skips one matrix only
    whole, state = trained(aida(**HYPER, layer_dims=1, clip_norm=0.1), stack, grads)
    apart, states = trained(aida(**HYPER, clip_norm=0.1), list(stack), [grads[:, i] for i in range(3)])
    assert gap(whole, jnp.stack(apart)) <= 1e-12
    assert state[0].skipped.tolist() == states[0].skipped.tolist() == [0, 0, 1]


def test_weight_decay_applies_where_the_mask_is_true() -> None:
    params = {"weight": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    zeros = jax.tree.map(lambda p: jnp.zeros((1, *p.shape)), params)
    optimizer = aida(0.1, weight_decay=0.5, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    decayed, _ = trained(optimizer, params, zeros)
    np.testing.assert_allclose(decayed["weight"], 0.95, rtol=1e-6)
    np.testing.assert_array_equal(decayed["bias"], 1)


# -- optax's and JAX's own tools ---------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_multi_transform_gives_each_label_its_own_values() -> None:
    shapes, values = ((7,), (33, 65)), ({**HYPER, "projections": 1}, {**HYPER, "lr": 3e-3, "clip_norm": 0.05})
    params, grads = parameters(torch.float64, shapes), gradients(torch.float64, shapes)
    both = optax.multi_transform({"a": aida(**values[0]), "b": aida(**values[1])}, ["a", "b"])
    together, _ = trained(both, params, grads)
    alone = [trained(aida(**v), [p], [g])[0][0] for v, p, g in zip(values, params, grads, strict=True)]
    assert gap(together, alone) == 0


@pytest.mark.usefixtures("float64")
def test_injected_values_are_those_of_the_state() -> None:
    params, grads = parameters(torch.float64, ((33, 65),)), gradients(torch.float64, ((33, 65),))
    values = {**HYPER, "weight_decay": 0.3, "clip_norm": 0.05}
    make = optax.inject_hyperparams(aida, static_args=STATIC_ARGS)
    optimizer = make(**{**values, "lr": 1.0, "eps": 1.0, "weight_decay": 0.0})
    state = optimizer.init(params)
    state.hyperparams.update({key: jnp.asarray(values[key]) for key in ("lr", "eps", "weight_decay")})
    assert gap(scanned(optimizer, params, state, grads)[0], trained(aida(**values), params, grads)[0]) <= 1e-15


@pytest.mark.parametrize("name", ["projections", "layer_dims"])
def test_what_cannot_be_injected_is_refused_with_the_way_out(name: str) -> None:
    static = [key for key in STATIC_ARGS if key != name]
    with pytest.raises(TypeError, match=f"{name} cannot be injected; pass static_args=STATIC_ARGS"):
        optax.inject_hyperparams(aida, static_args=static)().init(jnp.ones(2))


@pytest.mark.usefixtures("float64")
def test_a_schedule_is_the_learning_rate_of_each_step() -> None:
    params, grads = parameters(torch.float64, ((7,),)), gradients(torch.float64, ((7,),))
    rates = np.linspace(1e-2, 0, STEPS)
    scheduled, _ = trained(aida(**{**HYPER, "lr": jnp.asarray(rates).__getitem__}), params, grads)
    layer = Watched(np.array(params[0]), **HYPER)
    for rate, g in zip(rates, np.array(grads[0]), strict=True):
        layer.lr = float(rate)
        layer.step(g)
    assert gap(scheduled[0], layer.theta) <= 1e-12


def test_the_state_can_be_donated_and_gets_the_sharding_of_its_parameters() -> None:
    optimizer, params = aida(), {"a": jnp.ones((4, 2)), "b": jnp.ones(3)}
    state = optimizer.init(params)
    shapes = optax.tree.map_params(optimizer, lambda _, p: p.shape, state, params, transform_non_params=lambda _: None)
    assert shapes[0].mu == shapes[0].nu == {"a": (4, 2), "b": (3,)}
    update = jax.jit(optimizer.update, donate_argnums=(1,))
    _, after = update(params, state)
    assert after[0].count.tolist() == [1, 1]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("values", "all_reduces", "devices"), [({}, 1, 2), ({}, 1, 4), ({"clip_norm": 0.05}, 2, 4)])
def test_arrays_sharded_by_rows_end_like_whole_ones_with_one_all_reduce_for_all_leaves(
    values: dict[str, Any], all_reduces: int, devices: int
) -> None:
    shapes, optimizer = ((8, 5), (12,)), aida(**HYPER, **values)
    params, grads = parameters(torch.float64, shapes), gradients(torch.float64, shapes)
    mesh = jax.make_mesh((devices,), ("rows",), devices=jax.devices()[:devices])
    rows, rows_of_each_step = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("rows",), (None, "rows")))
    parts, part_grads = jax.device_put(params, rows), jax.device_put(grads, rows_of_each_step)
    state = optimizer.init(parts)
    assert all(leaf.sharding == rows for leaf in (*state[0].mu, *state[0].nu))

    program = scanned.lower(optimizer, parts, state, part_grads).compile()
    exchanges = r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    assert re.findall(exchanges, program.as_text()) == ["all-reduce"] * all_reduces
    sharded = program(parts, state, part_grads)
    assert all(not leaf.sharding.is_fully_replicated for leaf in sharded[0])
    found = gap(sharded, trained(optimizer, params, grads))
    print(f"{devices} devices {found:.1e}")  # for docs/integrations.md
    assert found <= 1e-12


# -- refusals and the documents ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"projections": -1}, "projections=-1 must be an integer >= 0"),
        ({"eps": 0.0}, "Invalid epsilon value"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"nonfinite": "raise"}, "nonfinite='raise' is not possible in JAX"),
    ],
    ids=str,
)
def test_invalid_values_are_refused_in_the_words_of_the_torch_class(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        aida(**values)


def test_what_does_not_fit_the_parameters_is_refused() -> None:
    with pytest.raises(TypeError, match="floating-point parameters"):
        aida().init(jnp.ones(2, dtype=jnp.int32))
    with pytest.raises(ValueError, match="layer_dims=1, but a leaf has shape"):
        aida(layer_dims=1).init(jnp.ones(()))
    with pytest.raises(ValueError, match="weight_decay needs the parameters"):
        aida(weight_decay=0.1).update(jnp.ones(2), aida().init(jnp.ones(2)))


def test_the_example_of_the_documents_learns() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/integrations.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "integrations.optax" in block]
    names: dict[str, Any] = {}
    exec(compile(code, "integrations.md", "exec"), names)
    assert names["losses"][-1] < 0.1 * names["losses"][0]
    assert names["skipped"] == {"bias": 0, "weight": 0}
