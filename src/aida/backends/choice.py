"""Which path a tensor takes: torch's flags select it, and None selects the fastest that fits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from aida._step.group_rules import is_plain
from aida._step.hyper import Hyper
from aida._step.storage import FULL, Storage
from aida.backends import Backend, Batch, Kind, cpu, triton
from aida.backends.foreach import Foreach
from aida.backends.reference import Reference
from aida.backends.tables import is_dense
from aida.backends.widened import Widened


class Route(NamedTuple):
    """The key of a batch: tensors with the same route share one."""

    kind: Kind
    device: torch.device
    param: torch.dtype
    grad: torch.dtype
    ranks: tuple[int, ...] = ()  #: that share the tensors; none if this rank has all of them to itself
    clips: bool = False  #: whether the tensors' gradients are clipped, if ranks share them
    storage: Storage = FULL


def distribute(found: Batch, index: int, group: dict[str, Any], hyper: Hyper, batches: dict[Route, Batch]) -> None:
    """Add one group's tensors to the batches of their routes, in order."""
    known: dict[tuple[Any, ...], Route] = {}
    routes: list[Route] = []
    for param, grad, origin in zip(found.params, found.grads, found.origins, strict=True):
        # for every tensor whenever batches are built, so a look-up replaces most calls
        scattered = next((layer for layer in origin.layers.views(param) if not _is_dense(layer)), None)
        ranks = () if origin.span is None else origin.span.ranks
        key = (type(param), type(grad), param.device, param.dtype, grad.dtype, scattered is None, ranks, origin.storage)
        route = known.get(key)
        if route is None:
            kind = kind_of(param if scattered is None else scattered, grad, group, hyper)
            clips = bool(ranks) and hyper.clip_norm is not None
            route = known[key] = Route(kind, param.device, param.dtype, grad.dtype, ranks, clips, origin.storage)
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


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or is_dense(tensor)


def make_backend(route: Route) -> Backend:
    if route.kind == "fused":
        return triton.Triton() if route.device.type == "cuda" else cpu.Cpu()
    backend: Backend = Foreach() if route.kind == "foreach" else Reference()
    return backend if route.storage == FULL else Widened(backend)


def kind_of(param: Tensor, grad: Tensor, group: dict[str, Any], hyper: Hyper) -> Kind:
    """The path of a tensor with its group's flags."""
    foreach, fused = group["foreach"], group["fused"]
    if group["differentiable"] or (foreach is False and not fused):
        return "reference"
    if torch.compiler.is_compiling():
        return "foreach"  # the compiler fuses plain operations, and cannot trace kernels
    if not (is_plain(param) and is_plain(grad)):
        return "reference"  # a subclass may keep its values elsewhere: only torch operations work
    if foreach or fused is False or in_dispatch_mode():
        return "foreach"
    if fused and not fused_available(param.device.type):
        raise RuntimeError(_why_not_fused(param.device.type))
    return "fused" if _fits_fused(param, grad, hyper) else "foreach"


def in_dispatch_mode() -> bool:
    """Whether a mode such as FakeTensorMode or FlopCounterMode is active, which must see every operation."""
    return bool(torch._C._len_torch_dispatch_stack())


def fused_available(device_type: str) -> bool:
    """Whether the fused path is available for this type of device."""
    if device_type == "cuda":
        return triton.available()
    return device_type == "cpu" and cpu.available()


def _fits_fused(param: Tensor, grad: Tensor, hyper: Hyper) -> bool:
    if not fused_available(param.device.type):
        return False
    if hyper.has_tensor_betas and any(isinstance(b, Tensor) and b.is_cuda for b in (hyper.beta1, hyper.beta2)):
        return False  # the tables hold numbers, and reading them from the device would synchronize
    return triton.fits(param, grad) if param.is_cuda else cpu.fits(param, grad)


def _why_not_fused(device_type: str) -> str:
    if device_type == "cuda":
        return "fused=True on a CUDA device needs Triton (pip install triton); fused=None takes the foreach path"
    if device_type == "cpu":
        return (
            "fused=True on the CPU needs the C kernel, which was not built: install a C compiler and reinstall "
            "aida-optim; fused=None takes the foreach path"
        )
    return (
        "`fused=True` requires all the params to be floating point Tensors of supported devices: cuda and cpu, not "
        f"{device_type}; use fused=None"
    )
