"""Which path a tensor takes: torch's own flags name them, None picks the fastest that fits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from aida._step.group_rules import is_plain
from aida._step.hyper import Hyper
from aida.backends import Backend, Batch, Kind, cpu, triton
from aida.backends.foreach import Foreach
from aida.backends.reference import Reference
from aida.backends.tables import is_dense


class Route(NamedTuple):
    """Tensors that agree in all of this share one batch."""

    kind: Kind
    device: torch.device
    param: torch.dtype
    grad: torch.dtype


def distribute(found: Batch, index: int, group: dict[str, Any], hyper: Hyper, batches: dict[Route, Batch]) -> None:
    """Move one group's tensors into the batches of their routes, keeping their order."""
    known: dict[tuple[Any, ...], Route] = {}
    routes: list[Route] = []
    for param, grad in zip(found.params, found.grads, strict=True):
        # on every tensor at every step, hence no call where a look-up will do
        dense = param.is_contiguous() or is_dense(param)
        key = (type(param), type(grad), param.device, param.dtype, grad.dtype, dense)
        route = known.get(key)
        if route is None:
            route = known[key] = Route(kind_of(param, grad, group, hyper), param.device, param.dtype, grad.dtype)
        routes.append(route)
    different = dict.fromkeys(routes)
    for route in different:
        part = found if len(different) == 1 else found.select([r == route for r in routes])
        part.runs, part.groups = [(hyper, len(part))], [index]
        batch = batches.get(route)
        if batch is None:
            batches[route] = part
        else:
            batch.extend(part)


def make_backend(route: Route) -> Backend:
    if route.kind == "fused":
        return _fused_backend(route.device.type)
    return Foreach() if route.kind == "foreach" else Reference()


def kind_of(param: Tensor, grad: Tensor, group: dict[str, Any], hyper: Hyper) -> Kind:
    """The path this tensor takes with these flags."""
    foreach, fused = group["foreach"], group["fused"]
    if group["differentiable"] or (foreach is False and not fused):
        return "reference"
    if torch.compiler.is_compiling():
        return "foreach"  # the compiler fuses plain operations, and cannot see into kernels
    if not (is_plain(param) and is_plain(grad)):
        return "reference"  # what a subclass wraps is found by torch's own operations alone
    if foreach or fused is False or in_dispatch_mode():
        return "foreach"
    if fused and not fused_available(param.device.type):
        raise RuntimeError(_why_not_fused(param.device.type))
    return "fused" if _fits_fused(param, grad, hyper) else "foreach"


def in_dispatch_mode() -> bool:
    """Whether a mode (FakeTensorMode, FlopCounterMode) wants to see every operation: kernels would pass it by."""
    return bool(torch._C._len_torch_dispatch_stack())


def fused_available(device_type: str) -> bool:
    """Whether the fused path exists on such devices here."""
    if device_type == "cuda":
        return triton.available()
    return device_type == "cpu" and cpu.available()


def _fits_fused(param: Tensor, grad: Tensor, hyper: Hyper) -> bool:
    if not fused_available(param.device.type):
        return False
    if hyper.has_tensor_betas and any(isinstance(b, Tensor) and b.is_cuda for b in (hyper.beta1, hyper.beta2)):
        return False  # the tables hold values, and reading them from the device would stop it
    return triton.fits(param, grad) if param.is_cuda else cpu.fits(param, grad)


def _fused_backend(device_type: str) -> Backend:
    return triton.Triton() if device_type == "cuda" else cpu.Cpu()


def _why_not_fused(device_type: str) -> str:
    if device_type == "cuda":
        return "fused=True on a CUDA device needs Triton (pip install triton); fused=None takes the foreach path"
    if device_type == "cpu":
        return (
            "fused=True on the CPU needs the C kernel, which was not built: reinstall aida-optim where a C compiler is "
            "found; fused=None takes the foreach path"
        )
    return (
        "`fused=True` requires all the params to be floating point Tensors of supported devices: cuda and cpu, not "
        f"{device_type}; leave fused=None"
    )
