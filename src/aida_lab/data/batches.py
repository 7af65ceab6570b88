"""Batches of decoded images by index. Worker processes read ahead from the last requested batch.

The images of a batch and their crops depend only on (seed, epoch, image), not on the number of workers or on the first
batch that was read.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from aida_lab.data.errors import DataError
from aida_lab.data.folders import ImageFolder, decode, pixels, random_resized_crop, resize_and_centre_crop
from aida_lab.task import stream

#: Split, epoch and image index: everything that a worker gets.
Key = tuple[str, int, int]
#: Pixels ``(batch, 3, size, size)`` in uint8 and channels-last memory format, and one class per image.
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over a split. Batch i is ``order[i * batch : (i + 1) * batch]``; each process reads its share of it."""

    split: str
    epoch: int
    order: Tensor
    batch: int
    rank: int = 0
    world: int = 1
    limit: int | None = None  #: maximum number of batches

    def __len__(self) -> int:
        count = -(-len(self.order) // self.batch)
        return count if self.limit is None else min(count, self.limit)

    def size(self, index: int) -> int:
        """Number of images in batch ``index``, over all processes."""
        return min(self.batch, len(self.order) - index * self.batch)

    def keys(self, index: int) -> list[Key]:
        """This process's share. It can be empty if the last batch has fewer images than there are processes."""
        whole = self.order[index * self.batch : (index + 1) * self.batch]
        return [(self.split, self.epoch, number) for number in whole[self.rank :: self.world].tolist()]


class Views(Dataset[tuple[Tensor, int]]):
    """The augmented images: random crops of "train", central crops of other splits."""

    def __init__(self, folders: Mapping[str, ImageFolder], seed: int, size: int, shorter: int) -> None:
        self.folders, self.seed, self.size, self.shorter = dict(folders), seed, size, shorter

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        split, epoch, index = key
        folder = self.folders[split]
        image = decode(folder.path(index))
        if split == "train":
            view = random_resized_crop(image, self.size, stream(self.seed, epoch, f"view {index}"))
        else:
            view = resize_and_centre_crop(image, self.size, self.shorter)
        return pixels(view), int(folder.labels[index])


class Batches:
    """Reads the batches of a pass. Any order works; consecutive batches are fastest."""

    def __init__(self, views: Views, workers: int, pinned: bool) -> None:
        self._plan = _Plan()
        self._loader = DataLoader(
            views,
            batch_sampler=self._plan,
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=pinned,
            persistent_workers=workers > 0,
            worker_init_fn=_ignore_interrupts,
            # otherwise each pass would draw its seed from torch's global generator and change the run's random state
            generator=torch.Generator(),
        )
        self._walk: Iterator[Batch] | None = None
        self._next = 0

    def read(self, which: Pass, index: int) -> Batch:
        """Batch ``index`` of a pass. Earlier batches are not decoded."""
        if self._walk is None or self._plan.which is not which or self._next != index:
            self._plan.which, self._plan.start = which, index
            self._walk = iter(self._loader)
        self._next = index + 1
        try:
            return next(self._walk)
        except DataError as error:
            # the message of a worker's error contains its traceback; the last line is the original message
            raise DataError(str(error).strip().rpartition("DataError: ")[2]) from None


class _Plan(Sampler[list[Key]]):
    """The keys that the loader sends to its workers: a pass from batch ``start`` on."""

    def __init__(self) -> None:
        self.which: Pass | None = None
        self.start = 0

    def __iter__(self) -> Iterator[list[Key]]:
        which = self.which
        if which is not None:
            for index in range(self.start, len(which)):
                if keys := which.keys(index):
                    yield keys


def _collate(items: list[tuple[Tensor, int]]) -> Batch:
    images = torch.stack([image for image, _ in items])
    return images.permute(0, 3, 1, 2), torch.tensor([label for _, label in items])


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal. Workers ignore it; the training process saves the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
