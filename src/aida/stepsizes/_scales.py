"""The effect of Aida's projections on each layer in the last step: the cosine of m and g, and the two scales.

They are computed after the step from the new momentum and the gradient. With L2 decay the parameter before
the step is needed too: it is the new one plus the update, which follows from the state. That is exact up to the
rounding of the parameter (relative 6e-8 in float32, 4e-3 in bf16, of a term that weight decay makes small).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida._step.sharding import is_dtensor
from aida.backends import scalar_dtype
from aida.optimizer import Aida
from aida.rule import clip_coefficient, residual_coefficients
from aida.stepsizes._pieces import HostCopy, Layer, Slot, by_size

#: The paper's gamma and beta, in ``m^(K) - g^(K) = scale_m * m - scale_g * g``, and the cosine of m and g, which is
#: None if one of them is zero: the names are those of a record's fields.
Scales = dict[str, Any]

#: Of a layer that the step did not update, and of other optimizers.
NO_SCALES: Scales = {"cosine": None, "scale_m": None, "scale_g": None}


class ScaleReader:
    """Collects inner products while the layers are read. Call :meth:`scales` after the copy is fetched."""

    def __init__(self, optimizer: Aida, copy: HostCopy) -> None:
        self._copy = copy
        # <m, g>, |m| and |g| over a piece of some layers, given by their numbers; g is the gradient that the step used
        self._products: list[tuple[Sequence[int], Hyper, list[Slot]]] = []
        self._grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self._found_inf = None if found_inf is None else copy.add(found_inf.reshape(1))
        clips = any(group["clip_norm"] is not None for group in optimizer.param_groups)
        self._squared_norm = self._total(optimizer.param_groups) if clips else None

    def gradients(self, layers: Sequence[Layer]) -> list[Tensor]:
        """The gradients of similar layers that :meth:`take` needs; none if they, or their norm, are not known."""
        gradients = [layer.grad.resolve_conj() for layer in layers if layer.grad is not None]
        return [] if layers[0].group["clip_norm"] is not None and self._squared_norm is None else gradients

    def take(
        self, layers: Sequence[int], sizes: Sequence[int], hyper: Hyper, m: Tensor, p: Tensor, g: Tensor, update: Tensor
    ) -> None:
        """Add a piece of momenta, parameters, gradients and updates.

        ``layers`` are the numbers of the layers in the piece, ``sizes`` their sizes.
        """
        g = g.to(m.dtype)
        scale = self._scale(hyper, m)
        if isinstance(scale, Tensor) or scale != 1:
            g = g * scale
        if hyper.l2:
            g = torch.add(g, p.to(m.dtype) + update, alpha=hyper.l2)
        norm = partial(torch.linalg.vector_norm, dim=1)
        found = [(products.sum(dim=1), norm(ms), norm(gs)) for products, ms, gs in by_size(sizes, m * g, m, g)]
        slots = [self._copy.add(*numbers) for numbers in zip(*found, strict=True)]
        self._products.append((layers, hyper, slots))

    def scales(self) -> dict[int, Scales]:
        """The scales of the layers that the step updated, by number. Layers with NaN or inf were skipped."""
        if self._found_inf is not None and self._found_inf.values.item() != 0:
            return {}
        sums: dict[int, tuple[Hyper, float, float, float]] = {}
        for layers, hyper, slots in self._products:
            for number, dot, m, g in zip(layers, *(slot.values.tolist() for slot in slots), strict=True):
                _, dots, mm, gg = sums.get(number, (hyper, 0.0, 0.0, 0.0))
                sums[number] = hyper, dots + dot, mm + m**2, gg + g**2
        scales: dict[int, Scales] = {}
        for number, (hyper, dot, mm, gg) in sums.items():
            if math.isfinite(dot) and math.isfinite(mm) and math.isfinite(gg):
                length = math.sqrt(mm) * math.sqrt(gg)
                cosine = min(max(dot / length, -1.0), 1.0) if length else None
                a, b = residual_coefficients(dot, mm, gg, hyper.projections, hyper.xi)
                scales[number] = {"cosine": cosine, "scale_m": a, "scale_g": -b}
        return scales

    def _scale(self, hyper: Hyper, like: Tensor) -> float | Tensor:
        """The factor of the gradient in the step: its sign, 1 / loss scale, clip coefficient."""
        scale: float | Tensor = hyper.sign
        if self._grad_scale is not None:
            scale = scale / self._grad_scale.to(like.device)
        if hyper.clip_norm is not None and self._squared_norm is not None:
            scale = scale * clip_coefficient(self._squared_norm.to(like.device), hyper.clip_norm)
        return scale.to(like.dtype) if isinstance(scale, Tensor) else scale

    def _total(self, groups: Iterable[dict[str, Any]]) -> Tensor | None:
        """The squared norm of all gradients that are clipped; None if other ranks have parts of them."""
        squares: list[Tensor] = []
        for group in groups:
            for p in group["params"] if group["clip_norm"] is not None else ():
                if is_dtensor(p):
                    return None
                if p.grad is not None:
                    norm = torch.linalg.vector_norm(p.grad, dtype=torch.promote_types(p.grad.dtype, torch.float32))
                    square = norm.real.to(scalar_dtype(norm.device)) ** 2
                    skips = group["nonfinite"] == "skip"
                    squares.append(torch.nan_to_num(square, nan=0.0, posinf=0.0) if skips else square)
        total = torch.as_tensor(sum(square.to(squares[0].device) for square in squares))
        return total if self._grad_scale is None else total / self._grad_scale.to(total) ** 2
