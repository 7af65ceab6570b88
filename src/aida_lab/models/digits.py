"""A small convolutional network for scikit-learn's 8x8 digits: 38,282 parameters, trains in seconds on one core."""

from __future__ import annotations

from torch import nn


class DigitsNet(nn.Sequential):
    """Two 3x3 convolutions, a max-pool, two linear layers: logits of images ``(batch, 1, 8, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.ReLU(inplace=True), nn.Linear(64, 10))
