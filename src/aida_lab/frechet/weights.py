"""Files of trained weights, checked by SHA-256 and read with ``weights_only``."""

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
    """A known file of weights."""

    name: str
    size: int
    sha256: str
    remedy: str  #: how to get it


class WeightsError(RuntimeError):
    """A file of weights is missing or is not the known one."""


def read_weights(file: WeightsFile, path: Path) -> Mapping[str, Tensor]:
    """The tensors of the known file. Other weights would change every measured distance."""
    if not path.is_file():
        raise WeightsError(f"{path} does not exist; {file.name} is needed: {file.remedy}")
    size = path.stat().st_size
    if size != file.size:
        raise WeightsError(f"{path} is not {file.name}: it has {size:,} bytes instead of {file.size:,}; {file.remedy}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != file.sha256:
        raise WeightsError(f"{path} is not {file.name}: its SHA-256 is {found} instead of {file.sha256}; {file.remedy}")
    weights: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def trained(build: Callable[[], Module], weights: Mapping[str, Tensor]) -> Module:
    """A frozen network in eval mode with these weights.

    It is built on the meta device, which draws no initial values: the feature network must not change the random
    state of the run.
    """
    with torch.device("meta"):
        network = build()
    network.load_state_dict(weights, assign=True)
    network.eval().requires_grad_(False)
    return network
