"""The first convolution of a network for small images: 3x3, few input channels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Stem(nn.Conv2d):
    """``nn.Conv2d(channels, width, 3, padding=1)``; on a GPU, one matrix product over all patches.

    cuDNN's kernels are made for many channels. With three, the forward and backward of this layer took a tenth of a
    step of VGG11, although it needs few operations.
    """

    def __init__(self, channels: int, width: int, *, bias: bool = True) -> None:
        super().__init__(channels, width, 3, padding=1, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.over_patches(images) if images.is_cuda else super().forward(images)

    def over_patches(self, images: Tensor) -> Tensor:
        """The convolution as a product of patches and weights. Compiled code writes the patches in one kernel."""
        patches = functional.pad(images, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        rows = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)
        padding = (0, -rows.size(-1) % 8)  # products over a multiple of 8 are several times as fast
        weight = functional.pad(self.weight.flatten(1), padding)
        return functional.linear(functional.pad(rows, padding), weight, self.bias).permute(0, 3, 1, 2)
