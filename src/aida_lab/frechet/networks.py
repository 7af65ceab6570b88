"""Feature networks, and the input format of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from aida_lab.frechet import efficientnet, inception
from aida_lab.frechet.moments import Moments


@dataclass(frozen=True)
class FeatureNetwork:
    """A trained network. Its input: square images of ``size`` pixels, values scaled to (value - centre) / scale."""

    #: Name of the distance in a run's metrics.
    metric: str
    #: Name of network and weights, used in file names.
    name: str
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


def efficientnet_lite0(device: torch.device) -> FeatureNetwork:
    """1280 features of 224 x 224 pixels."""
    return FeatureNetwork(
        metric="frechet_efficientnet_lite0",
        name=Path(efficientnet.FILE.name).stem,
        module=efficientnet.load_efficientnet_lite0().to(device),
        size=224,
        centre=127.0,
        scale=128.0,
    )


def inception_v3(weights: Path, device: torch.device) -> FeatureNetwork:
    """The 2048 features of FID, of 299 x 299 pixels in [-1, 1]."""
    return FeatureNetwork(
        metric="fid",
        name=Path(inception.FILE.name).stem,
        module=inception.load_inception(weights).to(device),
        size=299,
        centre=127.5,
        scale=127.5,
    )


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
