"""Aida for JAX: an optax ``GradientTransformation`` with the names and defaults of :class:`aida.Aida`.

Every leaf of the parameter tree is one layer. A step has the phases of the torch paths: reduce, scalars, apply. The
recursion over scalars is :func:`aida.rule.residual_coefficients`, which takes JAX arrays as well.

Inner products and scalars are float64 if ``jax_enable_x64`` is set, else float32. They are sums of elementwise
products, not ``dot_general``, so that no backend rounds the factors to bf16 or TF32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    if isinstance(lr, (int, float)):
        _check({"lr": lr})
    return optax.chain(
        scale_by_aida(
            betas,
            eps,
            weight_decay,
            projections=projections,
            xi=xi,
            decoupled_weight_decay=decoupled_weight_decay,
            clip_norm=clip_norm,
            nonfinite=nonfinite,
            layer_dims=layer_dims,
            mask=mask,
        ),
        optax.scale_by_learning_rate(lr),
    )


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
    _check(
        {
            "betas": betas, "eps": eps, "weight_decay": weight_decay, "projections": projections, "xi": xi,
            "clip_norm": clip_norm, "nonfinite": nonfinite, "layer_dims": layer_dims,
        }
    )  # fmt: skip
    if nonfinite == "raise":
        raise ValueError("nonfinite='raise' is not possible in JAX: a compiled step cannot raise; use 'skip'")
    skips, decays = nonfinite == "skip", not (isinstance(weight_decay, (int, float)) and weight_decay == 0)

    def init(params: Any) -> ScaleByAidaState:
        sizes = [_layers(p, layer_dims) for p in _leaves(params)]
        moment = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_state_dtype(p)), params)
        counters = jnp.zeros(sum(sizes), jnp.int32)
        return ScaleByAidaState(counters, counters, moment, jax.tree.map(jnp.zeros_like, moment))

    def update(updates: Any, state: ScaleByAidaState, params: Any = None) -> tuple[Any, ScaleByAidaState]:
        if decays and params is None:
            raise ValueError("weight_decay needs the parameters: call update(updates, state, params)")
        grads, tree = jax.tree.flatten(updates, is_leaf=_is_none)
        mus, nus = tree.flatten_up_to(state.mu), tree.flatten_up_to(state.nu)
        thetas = tree.flatten_up_to(params) if decays else [None] * len(grads)
        masked = tree.flatten_up_to(_decaying(mask, params)) if decays else [False] * len(grads)
        counts, skipped = _per_leaf(state.count, mus, layer_dims), _per_leaf(state.skipped, mus, layer_dims)
        given = [i for i, g in enumerate(grads) if g is not None]  # a leaf without gradient stays as it is

        for i in given:
            grads[i] = grads[i].astype(mus[i].dtype)
        usable: dict[int, Any] = {}
        if clip_norm is not None:
            squares = {i: _sum(grads[i], grads[i], layer_dims) for i in given}
            usable = {i: jnp.isfinite(squares[i]) for i in given}
            norm = jnp.sqrt(sum(jnp.sum(jnp.where(usable[i] | (not skips), squares[i], 0)) for i in given))
            clip = jnp.minimum(1, clip_norm / (norm + CLIP_GUARD))
            for i in given:
                grads[i] = grads[i] * clip.astype(grads[i].dtype)

        for i in given:
            g, mu, nu = grads[i], mus[i], nus[i]
            decay = weight_decay * thetas[i].astype(mu.dtype) if masked[i] else 0
            if not decoupled_weight_decay:
                g = g + decay

            # reduce
            m = betas[0] * mu + (1 - betas[0]) * g
            dot, mm, gg = _sum(m, g, layer_dims), _sum(m, m, layer_dims), _sum(g, g, layer_dims)

            # scalars
            a, b = residual_coefficients(dot, mm, gg, projections, xi)
            t = (counts[i] + 1).astype(dot.dtype)
            stepsize = jnp.sqrt(_bias_correction(betas[1], t)) / _bias_correction(betas[0], t)

            # apply
            residual = a.astype(m.dtype) * m + b.astype(m.dtype) * g
            v = betas[1] * nu + (1 - betas[1]) * residual**2 + eps
            step = stepsize.astype(m.dtype) * m / jnp.sqrt(v)
            if decoupled_weight_decay:
                step = step + decay

            changes = jnp.ones_like(t, dtype=bool)
            if skips:
                finite = usable.get(i, jnp.isfinite(gg) & (gg <= jnp.finfo(mu.dtype).max))
                changes, skipped[i] = finite, skipped[i] + ~finite
            grads[i], counts[i] = jnp.where(changes, step, 0), counts[i] + changes
            mus[i], nus[i] = jnp.where(changes, m, mu), jnp.where(changes, v, nu)

        return tree.unflatten(grads), ScaleByAidaState(
            _joined(counts), _joined(skipped), tree.unflatten(mus), tree.unflatten(nus)
        )

    return optax.GradientTransformation(init, update)


def _check(values: dict[str, Any]) -> None:
    """Refuse what the torch class refuses, in its words. Injected hyper-parameters cannot be read."""
    for name in set(STATIC_ARGS) & set(values):
        if isinstance(values[name], jax.Array):
            raise TypeError(f"{name} cannot be injected; pass static_args=STATIC_ARGS to inject_hyperparams")
    usual = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "projections": 2}
    known = {name: value for name, value in values.items() if not isinstance(value, jax.Array)}
    check_group({**OPTIONAL_DEFAULTS, **usual, **known})


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_none)


def _state_dtype(p: Any) -> Any:
    if not jnp.issubdtype(p.dtype, jnp.floating):
        raise TypeError(f"Aida updates floating-point parameters in JAX, not {p.dtype} (shape {p.shape})")
    return jnp.promote_types(p.dtype, jnp.float32)


def _layers(leaf: Any, layer_dims: int) -> int:
    """The number of layers in a leaf."""
    if leaf is None:
        return 0
    if leaf.ndim < layer_dims:
        raise ValueError(f"layer_dims={layer_dims}, but a leaf has shape {leaf.shape}; use optax.multi_transform")
    return math.prod(leaf.shape[:layer_dims])


def _per_leaf(counters: jax.Array, leaves: list[Any], layer_dims: int) -> list[Any]:
    """The counters of each leaf, in a shape that broadcasts with it."""
    ends = list(accumulate(_layers(leaf, layer_dims) for leaf in leaves))
    parts = zip([0, *ends], ends, leaves, strict=False)
    return [
        counters[start:end].reshape(() if x is None else x.shape[:layer_dims] + (1,) * (x.ndim - layer_dims))
        if x is not None
        else counters[start:end]
        for start, end, x in parts
    ]


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
