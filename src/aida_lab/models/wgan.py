"""Generator (3,576,704 parameters) and critic (2,765,569) of WGAN-GP for 64x64 images.

Initial values: convolutions N(0, .02); batch norms weight N(1, .02), bias 0; the critic's linear layer torch's default.
"""

from __future__ import annotations

from torch import Tensor, nn

#: Size of the generator's input.
NOISE = 100


class Generator(nn.Module):
    """Five transposed convolutions from noise to an image in [−1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = NOISE
        for width, stride, padding in ((512, 1, 0), (256, 2, 1), (128, 2, 1), (64, 2, 1)):
            layers += [
                nn.ConvTranspose2d(channels, width, 4, stride, padding, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels = width
        layers += [nn.ConvTranspose2d(channels, 3, 4, 2, 1, bias=False), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        self.apply(_initialise)

    def forward(self, noise: Tensor) -> Tensor:
        """Images ``(batch, 3, 64, 64)`` of noise ``(batch, 100)`` or ``(batch, 100, 1, 1)``."""
        images: Tensor = self.layers(noise.reshape(-1, NOISE, 1, 1))
        return images


class Critic(nn.Module):
    """Four strided convolutions and a linear layer to one unbounded score per image.

    The batch norms make a score depend on the whole batch, which the gradient penalty does not account for. They are
    here because the public code has them.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 128, 256, 512):
            layers.append(nn.Conv2d(channels, width, 4, 2, 1, bias=False))
            if channels != 3:
                layers.append(nn.BatchNorm2d(width))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            channels = width
        self.layers = nn.Sequential(*layers)
        self.score = nn.Linear(channels * 4 * 4, 1)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(batch,)`` of images ``(batch, 3, 64, 64)``."""
        scores: Tensor = self.score(self.layers(images).flatten(1))
        return scores.squeeze(1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)
