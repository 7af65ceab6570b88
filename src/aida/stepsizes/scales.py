"""What Aida's projections did to each layer in its last step: the cosine of m and g, and the two scales.

Read after the step, from what it left: the new momentum, the gradient as received, and, where L2 decay
is part of the gradient, the parameter before the step, which is the new one plus the update that the
state still tells. That is exact up to the rounding of the parameter (a relative 6e-8 in float32, 4e-3
in bf16, of a term that weight decay makes small).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aida.backends import scalar_dtype
from aida.hyper import Hyper, from_group
from aida.optimizer import Aida
from aida.rule import clip_coefficient, residual_coefficients
from aida.stepsizes.pieces import HostCopy, Slot, own_shard


@dataclass(frozen=True)
class LayerScales:
    """``m^(K) - g^(K) = of_m * m - of_g * g``, the paper's gamma and beta, and the cosine they come from."""

    cosine: float | None  #: None where m or g is zero
    of_m: float
    of_g: float


@dataclass(frozen=True)
class _Products:
    """Over one piece of several layers, one number a layer: <m, g>, |m| and |g|, g being what the step used."""

    dot: Slot
    m: Slot
    g: Slot


class ScaleReader:
    """Collects inner products while the layers are walked; :meth:`scales` after the copy came to the host."""

    def __init__(self, optimizer: Aida, copy: HostCopy) -> None:
        self._optimizer, self._copy = optimizer, copy
        self._layers: dict[Tensor, tuple[Hyper, list[tuple[_Products, int]]]] = {}
        self._grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self._found_inf = None if found_inf is None else copy.add(found_inf.reshape(()))
        self._squared_norm = self._total() if any(g["clip_norm"] is not None for g in optimizer.param_groups) else None

    def columns(self, params: Sequence[Tensor], group: dict[str, Any]) -> list[list[Tensor]]:
        """What :meth:`take` wants to see of layers that are alike; nothing without gradients, or of mere shards."""
        if params[0].grad is None or own_shard(params[0]) is not params[0]:
            return []
        momenta = [self._optimizer.state[param]["exp_avg"] for param in params]
        gradients = [param.grad for param in params if param.grad is not None]
        return [momenta, gradients, list(params)] if from_group(group).l2 else [momenta, gradients]

    def take(
        self, params: Sequence[Tensor], rows: Sequence[Tensor], stepsize: Tensor, step: float, group: dict[str, Any]
    ) -> None:
        """Take in a piece of those tensors, one row a layer, and the stepsizes of the same elements."""
        hyper, add = from_group(group), self._copy.add
        m, g = rows[0], rows[1].to(rows[0].dtype)
        scale = self._scale(hyper, m)
        if isinstance(scale, Tensor) or scale != 1:
            g = g * scale
        if hyper.l2:
            rate = hyper.lr / (1 - hyper.beta1**step)
            p = rows[2].to(m.dtype)
            before = p + m * stepsize * rate if isinstance(rate, Tensor) else torch.addcmul(p, m, stepsize, value=rate)
            g = torch.add(g, before, alpha=hyper.l2)
        products = _Products(
            dot=add(torch.linalg.vecdot(m, g)),
            m=add(torch.linalg.vector_norm(m, dim=1)),
            g=add(torch.linalg.vector_norm(g, dim=1)),
        )
        for row, param in enumerate(params):
            self._layers.setdefault(param, (hyper, []))[1].append((products, row))

    def scales(self) -> dict[Tensor, LayerScales]:
        """The layers that took part in the step: not those it skipped because of NaN or inf."""
        if self._found_inf is not None and self._found_inf.value != 0:
            return {}
        found = {param: _layer_scales(hyper, parts) for param, (hyper, parts) in self._layers.items()}
        return {param: scales for param, scales in found.items() if scales is not None}

    def _scale(self, hyper: Hyper, like: Tensor) -> float | Tensor:
        """What the step multiplied the gradient with: its sign, the loss scale and the clipping undone or done."""
        scale: float | Tensor = hyper.sign
        if self._grad_scale is not None:
            scale = scale / self._grad_scale.to(like.device)
        if hyper.clip_norm is not None and self._squared_norm is not None:
            scale = scale * clip_coefficient(self._squared_norm.to(like.device), hyper.clip_norm)
        return scale.to(like.dtype) if isinstance(scale, Tensor) else scale

    def _total(self) -> Tensor:
        """The squared norm of all gradients that clipping counts."""
        total: Tensor | None = None
        for group in self._optimizer.param_groups:
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


def _layer_scales(hyper: Hyper, parts: Iterable[tuple[_Products, int]]) -> LayerScales | None:
    mm = dot = gg = 0.0
    for part, row in parts:
        mm += part.m.values[row] ** 2
        dot += part.dot.values[row]
        gg += part.g.values[row] ** 2
    if not all(map(math.isfinite, (mm, dot, gg))):
        return None
    length = math.sqrt(mm) * math.sqrt(gg)
    cosine = min(max(dot / length, -1.0), 1.0) if length else None
    a, b = residual_coefficients(dot, mm, gg, hyper.projections, hyper.xi)
    return LayerScales(cosine, of_m=a, of_g=-b)
