"""ResNets of basic blocks: ResNet34 for CIFAR and ResNet18 for ImageNet.

ResNet34 has 21,282,122 parameters for 10 classes and 21,328,292 for 100; ResNet18 for 1000 has 11,689,512.
They differ in stem, depth and initial values: torch's defaults for CIFAR, He normal by fan-out on every convolution
for ImageNet, as in the standard model.
"""

from __future__ import annotations

from torch import Tensor, nn

from aida_lab.models.stem import Stem

WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut. If the shape changes, the shortcut is a strided 1x1 convolution."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        inner = self.relu(self.bn1(self.conv1(images)))
        out: Tensor = self.relu(self.bn2(self.conv2(inner)) + shortcut)
        return out


class ResNet(nn.Sequential):
    """Logits of images ``(batch, 3, height, width)``.

    A stem, four stages of basic blocks that halve the resolution between them, global pooling, a linear layer.
    """

    def __init__(self, stem: nn.Sequential, blocks: tuple[int, int, int, int], classes: int) -> None:
        super().__init__()
        self.stem = stem
        stages: list[nn.Module] = []
        channels = WIDTHS[0]
        for stage, (width, depth) in enumerate(zip(WIDTHS, blocks, strict=True)):
            rows: list[nn.Module] = []
            for block in range(depth):
                rows.append(BasicBlock(channels, width, stride=2 if stage > 0 and block == 0 else 1))
                channels = width
            stages.append(nn.Sequential(*rows))
        self.stages = nn.Sequential(*stages)
        # for the 4x4 feature maps of a CIFAR image this equals the public code's 4x4 average pool
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, classes)


def resnet34_cifar(classes: int = 10) -> ResNet:
    """ResNet34 with a 3x3 stem and no max-pool, for 32x32 images."""
    stem = nn.Sequential(Stem(3, WIDTHS[0], bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(inplace=True))
    return ResNet(stem, (3, 4, 6, 3), classes)


def resnet18_imagenet() -> ResNet:
    """The standard ResNet18: a strided 7x7 stem and a max-pool, for 224x224 images."""
    stem = nn.Sequential(
        nn.Conv2d(3, WIDTHS[0], 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(WIDTHS[0]),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    model = ResNet(stem, (2, 2, 2, 2), 1000)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
