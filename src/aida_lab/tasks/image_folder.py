"""Classification of images in class folders, decoded during training: ImageNet, in one or several processes.

Several processes share every batch: each reads its part, and gradients are averaged. Batch norms see the part of their
own process, as in the public code, which also splits the batch over GPUs. Their running statistics are those of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from aida_lab import distributed
from aida_lab.data.folders import IMAGENET_MEAN, IMAGENET_STD, Batches, Pass, Views, image_folder
from aida_lab.data.sets import DataSet
from aida_lab.task import TaskContext, backward_and_step
from aida_lab.tasks.classification import Classifier


class ImageFolders(Classifier):
    """Cross entropy over random crops of the "train" split. Accuracy on central crops of the "val" split."""

    def __init__(
        self, context: TaskContext, model: nn.Module, data: DataSet, *, size: int = 224, shorter: int = 256
    ) -> None:
        self._folders = {split: image_folder(data, split, context.data_root) for split in ("train", "val")}
        super().__init__(context, model, IMAGENET_MEAN, IMAGENET_STD, white=255.0)
        on_gpu = context.device.type == "cuda"
        self._layout = torch.channels_last if on_gpu else torch.contiguous_format
        self.model.to(memory_format=self._layout)  # type: ignore[call-overload] # torch leaves it out of its types
        self._parallel: nn.Module = self.model
        if distributed.world() > 1:
            self._parallel = DistributedDataParallel(self.model, device_ids=[context.device] if on_gpu else None)
        self._batches = Batches(Views(self._folders, self._spec.seed, size, shorter), context.workers, pinned=on_gpu)
        self._loss = self._compiled(self._cross_entropy)
        self._pass: Pass | None = None

    def begin_epoch(self, epoch: int) -> int:
        count = len(self._folders["train"])
        self._pass = self._new_pass("train", epoch, self._shuffled(count, epoch)[: self._limited(count)])
        if (smallest := self._pass.size(len(self._pass) - 1)) < distributed.world():
            raise ValueError(
                f"the last batch of an epoch has {smallest} images for {distributed.world()} processes; "
                "start fewer processes or choose another batch size"
            )
        return len(self._pass)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        assert self._pass is not None
        return self._read(self._pass, index)

    def kind(self, index: int) -> str:
        """The batch size: the last batch of an epoch is smaller."""
        assert self._pass is not None
        return str(self._pass.size(index))

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        """Returns the loss of the whole batch, the same in every process."""
        pixels, labels = batch
        optimizers["model"].zero_grad(set_to_none=True)
        return distributed.mean(backward_and_step(optimizers["model"], self._loss(pixels, labels, int(kind))))

    def evaluate(self, final: bool) -> Mapping[str, float]:
        distributed.broadcast_tensors(self.model.buffers())
        whole = len(self._folders["val"])
        count = self._limited(whole)
        images = self._new_pass("val", 0, torch.arange(count) * whole // count)  # all classes, even with a limit
        sums = self._sums(self._read(images, index) for index in range(len(images)) if images.keys(index))
        right, loss = distributed.total(sums).tolist()
        return {"accuracy": 100 * right / count, "valid_loss": loss / count}

    def _new_pass(self, split: str, epoch: int, order: Tensor) -> Pass:
        return Pass(split, epoch, order, self._spec.batch, distributed.rank(), distributed.world())

    def _read(self, images: Pass, index: int) -> tuple[Tensor, Tensor]:
        pixels, labels = (part.to(self._device, non_blocking=True) for part in self._batches.read(images, index))
        return pixels.contiguous(memory_format=self._layout), labels

    def _cross_entropy(self, pixels: Tensor, labels: Tensor, count: int) -> Tensor:
        """The sum over this process's part, scaled so that the average over all processes is the mean over the batch
        of ``count`` images, even if the parts differ in size."""
        loss = functional.cross_entropy(self._logits(self._parallel, pixels), labels, reduction="sum")
        return loss * (distributed.world() / count)
