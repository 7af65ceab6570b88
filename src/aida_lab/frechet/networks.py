"""Feature networks: their input, and their weights, which are checked by SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from aida_lab.frechet.moments import Moments


@dataclass(frozen=True)
class FeatureNetwork:
    """A trained network. Its input: square images of ``size`` pixels, values scaled to (value - centre) / scale."""

    metric: str  #: name of the distance in a run's metrics
    name: str  #: name of network and weights, used in file names
    module: nn.Module
    size: int
    centre: float
    scale: float

    def features(self, images: Tensor) -> Tensor:
        """``(batch, features)`` of uint8 images ``(batch, 3, height, width)``, always computed in float32."""
        # images are only enlarged here, so antialiasing would change nothing
        resized = functional.interpolate(images.float(), (self.size, self.size), mode="bilinear", align_corners=False)
        with torch.no_grad(), full_float32(images.device):
            found: Tensor = self.module((resized - self.centre) / self.scale)
        return found

    def moments(self, batches: Iterable[Tensor]) -> Moments:
        """Moments of the features of all images. Batches may differ in size but must not be empty."""
        found: Moments | None = None
        for images in batches:
            part = Moments.of(self.features(images))
            found = part if found is None else found.joined(part)
        if found is None:
            raise ValueError("no images to measure; pass at least one batch")
        return found.on_cpu()


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
    """The tensors of the known file."""
    check_weights(file, path)
    weights: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def check_weights(file: WeightsFile, path: Path) -> None:
    """Refuse any file but the known one. Other weights would change every measured distance."""
    if not path.is_file():
        raise WeightsError(f"{path} does not exist; {file.name} is needed: {file.remedy}")
    size = path.stat().st_size
    if size != file.size:
        raise WeightsError(f"{path} is not {file.name}: it has {size:,} bytes instead of {file.size:,}; {file.remedy}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != file.sha256:
        raise WeightsError(f"{path} is not {file.name}: its SHA-256 is {found} instead of {file.sha256}; {file.remedy}")


def trained(build: Callable[[], nn.Module], weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """A frozen network in eval mode with these weights.

    It is built on the meta device, which draws no initial values: the feature network must not change the random
    state of the run.
    """
    with torch.device("meta"):
        network = build()
    network.load_state_dict(weights, assign=True)
    return network.eval().requires_grad_(False).to(device)


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Convolutions without TF32 or autocast, so that runs of every precision are measured by the same network."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
