"""Which path a tensor takes: torch's own flags name them, None picks the fastest that fits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from aida.backends import Backend, Kind
from aida.backends.foreach import Foreach
from aida.backends.reference import Reference
from aida.hyper import Hyper


class Route(NamedTuple):
    """Tensors that agree in all of this share one batch."""

    kind: Kind
    device: torch.device
    param: torch.dtype
    grad: torch.dtype


def route_of(param: Tensor, grad: Tensor, group: dict[str, Any], hyper: Hyper) -> Route:
    return Route(_kind(param, group, hyper), param.device, param.dtype, grad.dtype)


def make_backend(route: Route) -> Backend:
    if route.kind == "foreach":
        return Foreach()
    return Reference()


def _kind(param: Tensor, group: dict[str, Any], hyper: Hyper) -> Kind:
    foreach, fused = group["foreach"], group["fused"]
    if group["differentiable"] or (foreach is False and not fused):
        return "reference"
    return "foreach"
