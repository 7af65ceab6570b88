"""Image classification: CIFAR with VGG11 and ResNet34, and scikit-learn's digits.

All images are on the device as uint8. The order, crops and flips of an epoch are drawn on the host from (seed, epoch),
so they are the same on every device. A GPU then crops the whole epoch at once, in a few milliseconds; a CPU crops each
batch when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from aida_lab.data.images import ImageSplits
from aida_lab.task import TaskContext, stream
from aida_lab.tasks.base import BaseTask, backward_and_step

#: Zero padding around an image before the random crop.
PADDING = 4

#: Batch size of the evaluation.
_EVALUATED = {"cuda": 2000, "cpu": 500}


@dataclass(frozen=True)
class Crops:
    """The order of the images in an epoch, where each is cropped, and whether it is mirrored."""

    order: Tensor
    rows: Tensor
    columns: Tensor
    mirrored: Tensor

    @classmethod
    def draw(cls, images: int, seed: int, epoch: int, augment: bool) -> Crops:
        order = torch.randperm(images, generator=stream(seed, epoch, "order"))
        if not augment:
            none = torch.zeros(images, dtype=torch.int64)
            return cls(order, none, none, none.bool())
        chance = stream(seed, epoch, "augmentation")
        rows, columns = torch.randint(0, 2 * PADDING + 1, (2, images), generator=chance).unbind()
        return cls(order, rows, columns, torch.randint(0, 2, (images,), generator=chance).bool())

    def to(self, device: torch.device) -> Crops:
        return Crops(*(part.to(device) for part in (self.order, self.rows, self.columns, self.mirrored)))

    def __getitem__(self, which: slice) -> Crops:
        return Crops(*(part[which] for part in (self.order, self.rows, self.columns, self.mirrored)))


def cut(padded: Tensor, size: int, crops: Crops) -> Tensor:
    """Crop images ``(count, height, width, channels)`` to ``(crops, channels, size, size)``, channels last."""
    across = torch.arange(size, device=padded.device)
    rows = crops.rows[:, None] + across
    columns = crops.columns[:, None] + torch.where(crops.mirrored[:, None], size - 1 - across, across)
    return padded[crops.order[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Classification(BaseTask):
    """Cross entropy over batches of augmented images. Test accuracy after every epoch."""

    def __init__(
        self,
        context: TaskContext,
        model: nn.Module,
        splits: ImageSplits,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        augment: bool,
        white: float = 255.0,
    ) -> None:
        self._context, self._spec, self._device = context, context.spec, context.device
        self._on_gpu = context.device.type == "cuda"
        self._model = model.to(context.device)
        self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.modules: Mapping[str, nn.Module] = {"model": self._model}
        self._augment = augment
        self._padding = PADDING if augment else 0
        self._size = splits.train.pixels.shape[-1]
        around = (0, 0, *(self._padding,) * 4)
        self._padded = functional.pad(splits.train.pixels.permute(0, 2, 3, 1).to(context.device), around)
        self._labels = splits.train.labels.to(context.device)
        self._test_pixels = splits.test.pixels.to(context.device, memory_format=torch.channels_last)
        self._test_labels = splits.test.labels.to(context.device)
        # normalisation of uint8 pixels: (pixel / white - mean) / std
        self._mean = torch.tensor(mean, device=context.device).view(-1, 1, 1) * white
        self._scale = 1 / (torch.tensor(std, device=context.device).view(-1, 1, 1) * white)
        self._crops: Crops | None = None
        self._epoch_pixels: Tensor | None = None
        self._epoch_labels = self._labels
        self._loss: Callable[[Tensor, Tensor], Tensor] = self._cross_entropy
        if self._spec.compiled:
            self._loss = torch.compile(self._cross_entropy, dynamic=False)

    def begin_epoch(self, epoch: int) -> int:
        count, limit = len(self._labels), self._spec.limit
        crops = Crops.draw(count, self._spec.seed, epoch, self._augment).to(self._device)
        self._crops, self._epoch_labels = crops, self._labels[crops.order]
        if self._on_gpu:
            self._epoch_pixels = cut(self._padded, self._size, crops)
        steps = -(-count // self._spec.batch)
        return steps if limit is None else min(steps, limit)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        assert self._crops is not None
        here = slice(index * self._spec.batch, (index + 1) * self._spec.batch)
        if self._epoch_pixels is not None:
            return self._epoch_pixels[here], self._epoch_labels[here]
        return cut(self._padded, self._size, self._crops[here]), self._epoch_labels[here]

    def kind(self, index: int) -> str:
        """The batch size: the last batch of an epoch is smaller."""
        return str(min(self._spec.batch, len(self._labels) - index * self._spec.batch))

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        optimizers["model"].zero_grad(set_to_none=True)
        return backward_and_step(optimizers["model"], self._loss(*batch))

    @torch.no_grad()
    def evaluate(self, final: bool) -> Mapping[str, float]:
        self._model.eval()
        at_once = _EVALUATED.get(self._device.type, 500)
        count = len(self._test_labels)
        if self._spec.limit is not None:
            count = min(count, self._spec.limit * self._spec.batch)
        right = torch.zeros((), dtype=torch.int64, device=self._device)
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for start in range(0, count, at_once):
            here = slice(start, min(start + at_once, count))
            logits, labels = self._logits(self._test_pixels[here]), self._test_labels[here]
            right += (logits.argmax(1) == labels).sum()
            loss += functional.cross_entropy(logits.float(), labels, reduction="sum")
        self._model.train()
        return {"accuracy": 100 * int(right) / count, "test_loss": float(loss) / count}

    def _logits(self, pixels: Tensor) -> Tensor:
        images = (pixels.float() - self._mean) * self._scale
        with self._context.autocast():
            logits: Tensor = self._model(images)
        return logits

    def _cross_entropy(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self._logits(pixels).float(), labels)
