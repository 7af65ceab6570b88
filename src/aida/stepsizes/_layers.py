"""The layers of a measurement, and which of them are read together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from aida.stepsizes import _pieces as tensor_pieces


class Layer(NamedTuple):
    """One parameter tensor of the optimizer."""

    name: str
    param: Tensor
    size: int  #: elements on this rank; complex elements count as two
    state: Mapping[str, Any]
    group_index: int
    group: dict[str, Any]
    step: float  #: its own counter


def blocks(layers: Sequence[Layer]) -> list[list[int]]:
    """Group the numbers of layers that are read together: similar ones, up to the size of a piece.

    The largest come first, so that layers of the same size and shape are adjacent.
    """
    alike: dict[Any, list[int]] = {}
    for number, layer in enumerate(layers):
        p = layer.param
        grad = None if p.grad is None else p.grad.dtype
        alike.setdefault((p.device, layer.group_index, layer.step, type(p), p.dtype, grad), []).append(number)
    found: list[list[int]] = []
    for (device, *_), same in alike.items():
        if device.type in tensor_pieces.HOSTS:
            found += [[number] for number in same]
            continue
        room = 0
        for number in sorted(same, key=lambda number: (-layers[number].size, layers[number].param.shape)):
            if layers[number].size > room:
                found.append([])
                room = tensor_pieces.PIECE
            found[-1].append(number)
            room -= layers[number].size
    return found
