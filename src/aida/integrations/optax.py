"""Aida for JAX: an optax ``GradientTransformation`` with the names and defaults of :class:`aida.Aida`.

Every leaf of the parameter tree is one layer. A step has the phases of the torch paths: reduce, scalars, apply. The
recursion over scalars is :func:`aida.rule.residual_coefficients`, which takes JAX arrays as well.

Inner products and scalars are float64 if ``jax_enable_x64`` is set, else float32. They are sums of elementwise
products, not ``dot_general``, so that no backend rounds the factors to bf16 or TF32.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from aida._step.hyper import OPTIONAL_DEFAULTS, check_group
from aida.rule import CLIP_GUARD, residual_coefficients

#: For ``optax.inject_hyperparams(aida, static_args=STATIC_ARGS)``: what must not become an array.
STATIC_ARGS = ("projections", "layer_dims", "mask")


class ScaleByAidaState(NamedTuple):
    """State of :func:`scale_by_aida`.

    The counters are vectors with one number per layer, in the order of ``jax.tree.leaves(params)``. Trees of scalars
    would look like parameters to tools that give the state the parameters' sharding.
    """

    count: jax.Array  #: steps taken
    skipped: jax.Array  #: steps skipped because of a gradient with NaN or inf
    mu: Any  #: first moment
    nu: Any  #: second moment


def aida(
    lr: Any = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    *,
    projections: int = 2,
    xi: Any = 1e-20,
    decoupled_weight_decay: bool = True,
    clip_norm: Any = None,
    nonfinite: Literal["skip", "propagate"] = "skip",
    layer_dims: int = 0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """AdaBelief whose range of stepsizes is narrowed by layerwise mutual projections.

    The arguments are those of :class:`aida.Aida`, whose docstring describes them, except:

    - ``lr`` may be a schedule, a function of the step.
    - ``mask`` selects the leaves with weight decay, as in :func:`optax.adamw`: a tree of bools, or a function of the
      parameters that returns one.
    - ``clip_norm`` and ``layer_dims`` hold for all leaves that this transformation gets. Use ``optax.multi_transform``
      for several values, as parameter groups in torch; each transformation then clips by its own norm.
    - ``nonfinite`` cannot be ``"raise"``, because a compiled step raises nothing. A skipped leaf gets a zero update.
    - ``maximize`` and ``split_sizes`` do not exist here, and complex parameters are refused.

    Moments are at least float32, also those of bf16 and fp16 parameters. Updates have the dtype of the moments, and
    ``optax.apply_updates`` rounds once. To inject hyper-parameters, pass ``static_args=STATIC_ARGS``.
    """
    if not callable(lr):
        _check({"lr": lr})
    direction = scale_by_aida(
        betas, eps, weight_decay, projections=projections, xi=xi, decoupled_weight_decay=decoupled_weight_decay,
        clip_norm=clip_norm, nonfinite=nonfinite, layer_dims=layer_dims, mask=mask,
    )  # fmt: skip
    return optax.chain(direction, optax.scale_by_learning_rate(lr))


def scale_by_aida(
    betas: tuple[float, float] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    *,
    projections: int = 2,
    xi: Any = 1e-20,
    decoupled_weight_decay: bool = True,
    clip_norm: Any = None,
    nonfinite: Literal["skip", "propagate"] = "skip",
    layer_dims: int = 0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """:func:`aida` without the learning rate.

    Weight decay and clipping are part of it, because a skipped leaf must not decay and must not count in the norm.
    """
    values = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "projections": projections, "xi": xi}
    _check({**values, "clip_norm": clip_norm, "nonfinite": nonfinite, "layer_dims": layer_dims})
    skips, decays = nonfinite == "skip", not (isinstance(weight_decay, (int, float)) and weight_decay == 0)

    def init(params: Any) -> ScaleByAidaState:
        shapes = [_counter_shape(p, layer_dims) for p in jax.tree.leaves(params, is_leaf=_is_none)]
        # no array twice, because jit refuses to donate one buffer twice
        count, skipped = (jnp.zeros(sum(map(math.prod, shapes)), jnp.int32) for _ in range(2))
        mu, nu = (jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_state_dtype(p)), params) for _ in range(2))
        return ScaleByAidaState(count, skipped, mu, nu)

    def update(updates: Any, state: ScaleByAidaState, params: Any = None) -> tuple[Any, ScaleByAidaState]:
        if decays and params is None:
            raise ValueError("weight_decay needs the parameters: call update(updates, state, params)")
        grads, tree = jax.tree.flatten(updates, is_leaf=_is_none)
        mus, nus = tree.flatten_up_to(state.mu), tree.flatten_up_to(state.nu)
        thetas = tree.flatten_up_to(params) if decays else grads
        chosen = tree.flatten_up_to(_decaying(mask, params)) if decays else [False] * len(grads)
        counts, skipped = (_per_leaf(counter, mus, layer_dims) for counter in (state.count, state.skipped))

        given = [i for i, g in enumerate(grads) if g is not None]  # a leaf without gradient stays as it is
        gs = [grads[i].astype(mus[i].dtype) for i in given]
        finite: list[Any] = [None] * len(gs)
        if clip_norm is not None:
            gs, finite = _clipped(gs, clip_norm, layer_dims, skips)

        for i, g, usable in zip(given, gs, finite, strict=True):
            decay = weight_decay * thetas[i].astype(g.dtype) if chosen[i] else 0
            if not decoupled_weight_decay:
                g = g + decay
            t = (counts[i] + 1).astype(jnp.result_type(float))
            step, m, v, gg = _step(g, mus[i], nus[i], t, betas, eps, projections, xi, layer_dims)
            if decoupled_weight_decay:
                step = step + decay
            changes = jnp.ones_like(gg, dtype=bool)
            if skips:
                changes = jnp.isfinite(gg) & (gg <= jnp.finfo(v.dtype).max) if usable is None else usable
                skipped[i] = skipped[i] + ~changes
            grads[i], counts[i] = jnp.where(changes, step, 0), counts[i] + changes
            mus[i], nus[i] = jnp.where(changes, m, mus[i]), jnp.where(changes, v, nus[i])

        moments = tree.unflatten(mus), tree.unflatten(nus)
        return tree.unflatten(grads), ScaleByAidaState(_joined(counts), _joined(skipped), *moments)

    return optax.GradientTransformation(init, update)


def _step(
    g: Any, mu: Any, nu: Any, t: Any, betas: tuple[float, float], eps: Any, projections: int, xi: Any, layer_dims: int
) -> tuple[Any, Any, Any, Any]:
    """One leaf's step before the learning rate, its new moments, and the squared norm of its gradient."""
    beta1, beta2 = betas

    # reduce
    m = (beta1 * mu + (1 - beta1) * g).astype(mu.dtype)
    dot, mm, gg = _sum(m, g, layer_dims), _sum(m, m, layer_dims), _sum(g, g, layer_dims)

    # scalars
    a, b = residual_coefficients(dot, mm, gg, projections, xi)
    stepsize = jnp.sqrt(_bias_correction(beta2, t)) / _bias_correction(beta1, t)

    # apply
    a, b, stepsize = (scalar.astype(mu.dtype) for scalar in (a, b, stepsize))
    v = (beta2 * nu + (1 - beta2) * (a * m + b * g) ** 2 + eps).astype(mu.dtype)
    return stepsize * m / jnp.sqrt(v), m, v, gg


def _clipped(grads: list[Any], clip_norm: Any, layer_dims: int, skips: bool) -> tuple[list[Any], list[Any]]:
    """The gradients, scaled as ``clip_grad_norm_`` does, and which of their layers are finite."""
    squares = [_sum(g, g, layer_dims) for g in grads]
    finite = [jnp.isfinite(square) for square in squares]
    if skips:  # skipped layers do not count in the norm
        squares = [jnp.where(ok, square, 0) for ok, square in zip(finite, squares, strict=True)]
    norm = jnp.sqrt(sum(map(jnp.sum, squares)))
    scale = jnp.minimum(1, clip_norm / (norm + CLIP_GUARD))
    return [g * scale.astype(g.dtype) for g in grads], finite


def _check(values: dict[str, Any]) -> None:
    """Refuse what the torch class refuses, in its words. Injected hyper-parameters cannot be read."""
    for name in set(STATIC_ARGS) & set(values):
        if isinstance(values[name], jax.Array):
            raise TypeError(f"{name} cannot be injected; pass static_args=STATIC_ARGS to inject_hyperparams")
    usual = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "projections": 2}
    known = {name: value for name, value in values.items() if not isinstance(value, jax.Array)}
    check_group({**OPTIONAL_DEFAULTS, **usual, **known})
    if known.get("nonfinite") == "raise":
        raise ValueError("nonfinite='raise' is not possible in JAX: a compiled step cannot raise; use 'skip'")


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _state_dtype(p: Any) -> Any:
    if not jnp.issubdtype(p.dtype, jnp.floating):
        raise TypeError(f"Aida updates floating-point parameters in JAX, not {p.dtype} (shape {p.shape})")
    return jnp.promote_types(p.dtype, jnp.float32)


def _counter_shape(leaf: Any, layer_dims: int) -> tuple[int, ...]:
    """One number per layer, in a shape that broadcasts with the leaf."""
    if leaf is None:
        return (0,)
    if leaf.ndim < layer_dims:
        raise ValueError(f"layer_dims={layer_dims}, but a leaf has shape {leaf.shape}; use optax.multi_transform")
    return (*leaf.shape[:layer_dims], *[1] * (leaf.ndim - layer_dims))


def _per_leaf(counters: jax.Array, leaves: list[Any], layer_dims: int) -> list[Any]:
    """A vector of counters, cut into those of each leaf."""
    shapes = [_counter_shape(leaf, layer_dims) for leaf in leaves]
    parts = jnp.split(counters, list(accumulate(map(math.prod, shapes)))[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=False)]


def _joined(counters: list[Any]) -> jax.Array:
    return jnp.concatenate([counter.reshape(-1) for counter in counters]) if counters else jnp.zeros(0, jnp.int32)


def _decaying(mask: Any, params: Any) -> Any:
    """A bool for every leaf: whether weight decay applies."""
    found = mask(params) if callable(mask) else mask
    return jax.tree.broadcast(True if found is None else found, params, is_leaf=_is_none)


def _sum(x: jax.Array, y: jax.Array, layer_dims: int) -> jax.Array:
    """The inner product of each layer, in the widest enabled dtype and a shape that broadcasts with the leaf."""
    wide = jnp.result_type(float)
    return jnp.sum(x.astype(wide) * y.astype(wide), axis=tuple(range(layer_dims, x.ndim)), keepdims=True)


def _bias_correction(beta: float, t: jax.Array) -> jax.Array:
    """``1 - beta**t``, which keeps its digits in float32 too."""
    return -jnp.expm1(t * (math.log(beta) if beta else -math.inf))
