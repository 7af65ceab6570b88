"""The parameter shapes of the models whose optimizer step is measured, in the order of registration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

Shapes = list[tuple[int, ...]]


def resnet34(classes: int = 10) -> Shapes:
    """ResNet34 for 32 x 32 images: a 3 x 3 stem of 64, BasicBlocks [3, 4, 6, 3]."""
    shapes = [*_conv(3, 64, 3), *_norm(64)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [*_conv(width_in, width, 3), *_norm(width), *_conv(width, width, 3), *_norm(width)]
            if block == 0 and width_in != width:  # the shortcut must change its width as well
                shapes += [*_conv(width_in, width, 1), *_norm(width)]
            width_in = width
    return [*shapes, *_linear(512, classes)]


def vgg11(classes: int = 10) -> Shapes:
    """VGG11 without batch norm for 32 x 32 images, with its three linear layers of 512."""
    shapes: Shapes = []
    width_in = 3
    for width in (64, 128, 256, 256, 512, 512, 512, 512):
        shapes += [*_conv(width_in, width, 3), (width,)]
        width_in = width
    return [*shapes, *_linear(512, 512), *_linear(512, 512), *_linear(512, classes)]


def gpt(*, layers: int, width: int, context: int, vocabulary: int = 50257) -> Shapes:
    """A decoder of GPT-2's design: learned positions, biases everywhere, the head tied to the embedding."""
    block = [
        *_norm(width), *_linear(width, 3 * width), *_linear(width, width),
        *_norm(width), *_linear(width, 4 * width), *_linear(4 * width, width),
    ]  # fmt: skip
    return [(vocabulary, width), (context, width), *(block * layers), *_norm(width)]


def gpt2() -> Shapes:
    return gpt(layers=12, width=768, context=1024)


def gpt_1b3() -> Shapes:
    return gpt(layers=24, width=2048, context=2048)


def many_tensors(count: int = 500) -> Shapes:
    """Small tensors in plenty, as a step with a parameter group each meets them: overhead outweighs bytes."""
    layer = [*_linear(128, 128), *_linear(128, 512)]
    return (layer * -(-count // len(layer)))[:count]


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _conv(width_in: int, width_out: int, kernel: int) -> Shapes:
    return [(width_out, width_in, kernel, kernel)]


def _norm(width: int) -> Shapes:
    return [(width,), (width,)]


def _linear(width_in: int, width_out: int) -> Shapes:
    return [(width_out, width_in), (width_out,)]


MODELS: Mapping[str, Callable[[], Shapes]] = MappingProxyType(
    {"resnet34": resnet34, "vgg11": vgg11, "gpt2": gpt2, "gpt-1.3b": gpt_1b3}
)
