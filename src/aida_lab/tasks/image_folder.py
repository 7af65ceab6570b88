"""Classification of images in class folders, decoded during training: ImageNet, in one or several processes.

Several processes share every batch: each reads its part, and gradients are averaged. Batch norms see the part of their
own process, as in the public code, which also splits the batch over GPUs. Their running statistics are those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from aida_lab import distributed
from aida_lab.data.batches import Batches, Pass, Views
from aida_lab.data.folders import IMAGENET_MEAN, IMAGENET_STD, image_folder
from aida_lab.data.sets import DataSet
from aida_lab.task import TaskContext, stream
from aida_lab.tasks.base import BaseTask, backward_and_step


class ImageFolders(BaseTask):
    """Cross entropy over random crops of the "train" split. Accuracy on central crops of the "val" split."""

    def __init__(
        self, context: TaskContext, model: nn.Module, data: DataSet, *, size: int = 224, shorter: int = 256
    ) -> None:
        self._context, self._spec, self._device = context, context.spec, context.device
        self._folders = {split: image_folder(data, split, context.data_root) for split in ("train", "val")}
        on_gpu = context.device.type == "cuda"
        self._layout = torch.channels_last if on_gpu else torch.contiguous_format
        self._model = model.to(context.device)
        self._model.to(memory_format=self._layout)  # type: ignore[call-overload] # torch leaves it out of its types
        self.modules: Mapping[str, nn.Module] = {"model": self._model}
        self._parallel: nn.Module = self._model
        if distributed.world() > 1:
            self._parallel = DistributedDataParallel(self._model, device_ids=[context.device] if on_gpu else None)
        self._batches = Batches(Views(self._folders, self._spec.seed, size, shorter), context.workers, pinned=on_gpu)
        # normalisation of uint8 pixels: (pixel / 255 - mean) / std
        self._mean = torch.tensor(IMAGENET_MEAN, device=context.device).view(-1, 1, 1) * 255
        self._scale = 1 / (torch.tensor(IMAGENET_STD, device=context.device).view(-1, 1, 1) * 255)
        self._loss: Callable[[Tensor, Tensor, int], Tensor] = self._cross_entropy
        if self._spec.compiled:
            self._loss = torch.compile(self._cross_entropy, dynamic=False)
        self._pass: Pass | None = None

    def begin_epoch(self, epoch: int) -> int:
        order = torch.randperm(len(self._folders["train"]), generator=stream(self._spec.seed, epoch, "order"))
        self._pass = self._new_pass("train", epoch, order)
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

    @torch.no_grad()
    def evaluate(self, final: bool) -> Mapping[str, float]:
        distributed.broadcast_tensors(self._model.buffers())
        self._model.eval()
        count = whole = len(self._folders["val"])
        if self._spec.limit is not None:
            count = min(whole, self._spec.limit * self._spec.batch)
        images = self._new_pass("val", 0, torch.arange(count) * whole // count)  # all classes, even with a limit
        right, loss = torch.zeros(2, dtype=torch.float64, device=self._device).unbind()
        for index in range(len(images)):
            if not images.keys(index):
                continue
            pixels, labels = self._read(images, index)
            logits = self._logits(self._model, pixels).float()
            right += (logits.argmax(1) == labels).sum()
            loss += functional.cross_entropy(logits, labels, reduction="sum")
        self._model.train()
        seen = sum(images.size(index) for index in range(len(images)))
        sums = distributed.total(torch.stack([right, loss])).tolist()
        return {"accuracy": 100 * sums[0] / seen, "valid_loss": sums[1] / seen}

    def _new_pass(self, split: str, epoch: int, order: Tensor) -> Pass:
        rank, world = distributed.rank(), distributed.world()
        return Pass(split, epoch, order, self._spec.batch, rank, world, self._spec.limit)

    def _read(self, images: Pass, index: int) -> tuple[Tensor, Tensor]:
        pixels, labels = self._batches.read(images, index)
        return pixels.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)

    def _logits(self, model: nn.Module, pixels: Tensor) -> Tensor:
        images = ((pixels.float() - self._mean) * self._scale).contiguous(memory_format=self._layout)
        with self._context.autocast():
            logits: Tensor = model(images)
        return logits

    def _cross_entropy(self, pixels: Tensor, labels: Tensor, count: int) -> Tensor:
        """The sum over this process's part, scaled so that the average over all processes is the mean over the batch
        of ``count`` images, even if the parts differ in size."""
        loss = functional.cross_entropy(self._logits(self._parallel, pixels).float(), labels, reduction="sum")
        return loss * (distributed.world() / count)
