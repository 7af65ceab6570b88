"""VGG11 without batch norm, for 32x32 images: 9,750,922 parameters for 10 classes, 9,797,092 for 100.

11 of its 22 tensors are weights, the "11 neural layers" of the paper's stepsize figures.
"""

from __future__ import annotations

import math

from torch import nn

from aida_lab.models.stem import Stem

#: Widths of the 3x3 convolutions, one tuple per resolution. A 2x2 max-pool ends each stage, so 32 pixels become 1.
STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


class VGG11(nn.Sequential):
    """Logits of images ``(batch, 3, 32, 32)``: eight convolutions and three linear layers with ReLU between them.

    Dropout comes before the first two linear layers.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in STAGES:
            for width in stage:
                convolution = nn.Conv2d(channels, width, 3, padding=1) if layers else Stem(channels, width)
                layers += [convolution, nn.ReLU(inplace=True)]
                channels = width
            # pool before the ReLU: same values and gradients, but the ReLU sees a quarter of the pixels
            layers.insert(-1, nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(channels, 512),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(512, 512),
            nn.ReLU(inplace=True),
            nn.Linear(512, classes),
        )
        self.features.apply(_initialise)


def _initialise(module: nn.Module) -> None:
    """Convolutions from N(0, sqrt(2 / (k^2 * out))), bias 0. torch's default would vanish with depth."""
    if isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
        nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan_out))
        assert module.bias is not None
        nn.init.zeros_(module.bias)
