"""Image classification: CIFAR with VGG11 and ResNet34, and scikit-learn's digits.

All images are on the device as uint8. The order, crops and flips of an epoch are drawn on the host from (seed, epoch),
so they are the same on every device. A GPU then crops the whole epoch at once, in a few milliseconds; a CPU crops each
batch when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from aida_lab.data.images import ImageSplits
from aida_lab.task import Task, TaskContext, backward_and_step, stream

#: Zero padding around an image before the random crop.
PADDING = 4

#: Batch size of the evaluation.
_EVALUATED = {"cuda": 2000, "cpu": 500}


class Crops(NamedTuple):
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


def cut(padded: Tensor, size: int, crops: Crops) -> Tensor:
    """Crop images ``(count, height, width, channels)`` to ``(crops, channels, size, size)``, channels last."""
    across = torch.arange(size, device=padded.device)
    rows = crops.rows[:, None] + across
    columns = crops.columns[:, None] + torch.where(crops.mirrored[:, None], size - 1 - across, across)
    return padded[crops.order[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Classifier(Task):
    """The loss and the accuracy of a model that reads normalised images.

    ``mean`` and ``std`` are those of a channel, for pixels between 0 and 1; ``white`` is the uint8 pixel that means 1.
    """

    def __init__(
        self, context: TaskContext, model: nn.Module, mean: Sequence[float], std: Sequence[float], white: float
    ) -> None:
        super().__init__(context, model=model)
        self.model = model
        self._mean = torch.tensor(mean, device=context.device).view(-1, 1, 1) * white
        self._scale = 1 / (torch.tensor(std, device=context.device).view(-1, 1, 1) * white)

    def _logits(self, model: nn.Module, pixels: Tensor) -> Tensor:
        images = (pixels.float() - self._mean) * self._scale
        with self._context.autocast():
            logits: Tensor = model(images)
        return logits.float()

    @torch.no_grad()
    def _sums(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """The number of right answers and the summed loss."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        self.model.eval()
        for pixels, labels in batches:
            logits = self._logits(self.model, pixels)
            right = (logits.argmax(1) == labels).sum()
            loss = functional.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack([right.double(), loss.double()])
        self.model.train()
        return sums


class Classification(Classifier):
    """Cross entropy over batches of augmented images. Test accuracy after every epoch."""

    def __init__(
        self,
        context: TaskContext,
        model: nn.Module,
        splits: ImageSplits,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        augment: bool,
        white: float = 255.0,
    ) -> None:
        super().__init__(context, model, mean, std, white)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._augment = augment
        self._size = splits.train.pixels.shape[-1]
        around = (0, 0, *(PADDING if augment else 0,) * 4)
        self._padded = functional.pad(splits.train.pixels.permute(0, 2, 3, 1).to(context.device), around)
        self._labels = splits.train.labels.to(context.device)
        self._test_pixels = splits.test.pixels.to(context.device, memory_format=torch.channels_last)
        self._test_labels = splits.test.labels.to(context.device)
        self._crops: Crops | None = None
        self._epoch_pixels: Tensor | None = None
        self._epoch_labels = self._labels
        self._loss = self._compiled(self._cross_entropy)

    def begin_epoch(self, epoch: int) -> int:
        drawn = Crops.draw(len(self._labels), self._spec.seed, epoch, self._augment)
        self._crops = Crops(*(part.to(self._device) for part in drawn))
        self._epoch_labels = self._labels[self._crops.order]
        if self._device.type == "cuda":
            self._epoch_pixels = cut(self._padded, self._size, self._crops)
        return -(-self._limited(len(self._labels)) // self._spec.batch)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        assert self._crops is not None
        here = slice(index * self._spec.batch, (index + 1) * self._spec.batch)
        if self._epoch_pixels is not None:
            return self._epoch_pixels[here], self._epoch_labels[here]
        crops = Crops(*(part[here] for part in self._crops))
        return cut(self._padded, self._size, crops), self._epoch_labels[here]

    def kind(self, index: int) -> str:
        """The batch size: the last batch of an epoch is smaller."""
        return str(min(self._spec.batch, len(self._labels) - index * self._spec.batch))

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        optimizers["model"].zero_grad(set_to_none=True)
        return backward_and_step(optimizers["model"], self._loss(*batch))

    def evaluate(self, final: bool) -> Mapping[str, float]:
        count = self._limited(len(self._test_labels))
        at_once = _EVALUATED.get(self._device.type, 500)
        pixels, labels = (part[:count].split(at_once) for part in (self._test_pixels, self._test_labels))
        right, loss = self._sums(zip(pixels, labels, strict=True)).tolist()
        return {"accuracy": 100 * right / count, "test_loss": loss / count}

    def _cross_entropy(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self._logits(self.model, pixels), labels)
