"""The effect of Aida's projections on each layer in the last step: the cosine of m and g, and the two scales.

They are computed after the step from the new momentum and the gradient. With L2 decay the parameter before
the step is needed too: it is the new one plus the update, which follows from the state. That is exact up to the
rounding of the parameter (relative 6e-8 in float32, 4e-3 in bf16, of a term that weight decay makes small).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aida._step.hyper import Hyper, from_group
from aida.backends import scalar_dtype
from aida.optimizer import Aida
from aida.rule import clip_coefficient, residual_coefficients
from aida.stepsizes._layers import Layer
from aida.stepsizes._pieces import HostCopy, Slot, by_size, own_shard


class LayerScales(NamedTuple):
    """The paper's gamma and beta, in ``m^(K) - g^(K) = of_m * m - of_g * g``, and the cosine of m and g."""

    cosine: float | None  #: None if m or g is zero
    of_m: float
    of_g: float


class _Products(NamedTuple):
    """<m, g>, |m| and |g| over a piece of some layers, one number per layer; g is the gradient that the step used."""

    layers: Sequence[int]  #: their numbers
    hyper: Hyper
    dot: Slot
    m: Slot
    g: Slot


class ScaleReader:
    """Collects inner products while the layers are read. Call :meth:`scales` after the copy is fetched."""

    def __init__(self, optimizer: Aida, copy: HostCopy) -> None:
        self._copy = copy
        self._products: list[_Products] = []
        self._grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self._found_inf = None if found_inf is None else copy.add(found_inf.reshape(1))
        clips = any(group["clip_norm"] is not None for group in optimizer.param_groups)
        self._squared_norm = self._total(optimizer.param_groups) if clips else None

    def columns(self, layers: Sequence[Layer]) -> list[list[Tensor]]:
        """The tensors of similar layers that :meth:`take` needs; none without gradients or for shards."""
        first = layers[0].param
        if first.grad is None or own_shard(first) is not first:
            return []
        momenta = [layer.state["exp_avg"] for layer in layers]
        params = [layer.param for layer in layers]
        gradients = [param.grad.resolve_conj() for param in params if param.grad is not None]
        return [momenta, gradients, params] if from_group(layers[0].group).l2 else [momenta, gradients]

    def take(
        self, layers: Sequence[int], like: Layer, flat: Sequence[Tensor], stepsize: Tensor, sizes: Sequence[int]
    ) -> None:
        """Add a piece of those tensors, with the stepsizes of its elements.

        ``layers`` are the numbers of the layers in the piece, ``sizes`` their sizes, and ``like`` is one of them.
        """
        hyper = from_group(like.group)
        m, g = flat[0], flat[1].to(flat[0].dtype)
        scale = self._scale(hyper, m)
        if isinstance(scale, Tensor) or scale != 1:
            g = g * scale
        if hyper.l2:
            rate = hyper.lr / (1 - hyper.beta1**like.step)
            p = flat[2].to(m.dtype)
            before = p + m * stepsize * rate if isinstance(rate, Tensor) else torch.addcmul(p, m, stepsize, value=rate)
            g = torch.add(g, before, alpha=hyper.l2)
        norm = partial(torch.linalg.vector_norm, dim=1)
        found = [(products.sum(dim=1), norm(ms), norm(gs)) for products, ms, gs in by_size(sizes, m * g, m, g)]
        slots = (self._copy.add(*numbers) for numbers in zip(*found, strict=True))
        self._products.append(_Products(layers, hyper, *slots))

    def scales(self) -> dict[int, LayerScales]:
        """The scales of the layers that the step updated, by number. Layers with NaN or inf were skipped."""
        if self._found_inf is not None and self._found_inf.value != 0:
            return {}
        sums: dict[int, tuple[Hyper, float, float, float]] = {}
        for layers, hyper, *slots in self._products:
            for number, dot, m, g in zip(layers, *(slot.values.tolist() for slot in slots), strict=True):
                _, dots, mm, gg = sums.get(number, (hyper, 0.0, 0.0, 0.0))
                sums[number] = hyper, dots + dot, mm + m**2, gg + g**2
        found = {number: _layer_scales(*of_layer) for number, of_layer in sums.items()}
        return {number: scales for number, scales in found.items() if scales is not None}

    def _scale(self, hyper: Hyper, like: Tensor) -> float | Tensor:
        """The factor of the gradient in the step: its sign, 1 / loss scale, clip coefficient."""
        scale: float | Tensor = hyper.sign
        if self._grad_scale is not None:
            scale = scale / self._grad_scale.to(like.device)
        if hyper.clip_norm is not None and self._squared_norm is not None:
            scale = scale * clip_coefficient(self._squared_norm.to(like.device), hyper.clip_norm)
        return scale.to(like.dtype) if isinstance(scale, Tensor) else scale

    def _total(self, groups: Iterable[dict[str, Any]]) -> Tensor:
        """The squared norm of all gradients that are clipped."""
        total: Tensor | None = None
        for group in groups:
            norms = [
                torch.linalg.vector_norm(p.grad, dtype=torch.promote_types(p.grad.dtype, torch.float32))
                for p in group["params"]
                if p.grad is not None and group["clip_norm"] is not None
            ]
            for norm in norms:
                square = norm.real.to(scalar_dtype(norm.device)) ** 2
                if group["nonfinite"] == "skip":
                    square = torch.nan_to_num(square, nan=0.0, posinf=0.0)
                total = square if total is None else total + square.to(total.device)
        total = torch.zeros(()) if total is None else total
        return total if self._grad_scale is None else total / self._grad_scale.to(total) ** 2


def _layer_scales(hyper: Hyper, dot: float, mm: float, gg: float) -> LayerScales | None:
    if not (math.isfinite(dot) and math.isfinite(mm) and math.isfinite(gg)):
        return None
    length = math.sqrt(mm) * math.sqrt(gg)
    cosine = min(max(dot / length, -1.0), 1.0) if length else None
    a, b = residual_coefficients(dot, mm, gg, hyper.projections, hyper.xi)
    return LayerScales(cosine, of_m=a, of_g=-b)
