"""Files of trained weights: known by their checksum, and read without unpickling anything but tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class WeightsFile:
    """What a file of weights must be."""

    name: str
    size: int
    sha256: str
    #: How to get it.
    remedy: str


class WeightsError(RuntimeError):
    """A file of weights is missing, or is another file."""


def read_weights(file: WeightsFile, path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file that is exactly the known one: with others every measured distance would be another."""
    if not path.is_file():
        raise WeightsError(f"there is no {path}; {file.name} is wanted: {file.remedy}")
    size = path.stat().st_size
    if size != file.size:
        raise WeightsError(
            f"{path} is not {file.name}: it has {size:,} bytes where {file.size:,} belong; {file.remedy}"
        )
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != file.sha256:
        raise WeightsError(
            f"{path} is not {file.name}: its SHA-256 is {digest.hexdigest()} where {file.sha256} belongs; {file.remedy}"
        )
    weights: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def trained(build: Callable[[], Module], weights: Mapping[str, Tensor]) -> Module:
    """A network with these weights, for measuring alone; torch's generators are as before.

    Built as usual it would draw initial values, and a run would start elsewhere depending on what measures it.
    """
    with torch.device("meta"):
        network = build()
    network.load_state_dict(weights, assign=True)
    network.eval().requires_grad_(False)
    return network
