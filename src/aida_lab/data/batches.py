"""Batches of decoded images, asked for by number: worker processes read ahead from there on.

Which images a batch holds and how each is cropped follows from (seed, epoch, image) alone: neither the number of
workers nor where the reading began shows in the pixels.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from aida_lab.data.errors import DataError
from aida_lab.data.folders import ImageFolder, centre_view, decode, pixels, random_view
from aida_lab.task import stream

#: Split, epoch, number of the image: all that a worker is told.
Key = tuple[str, int, int]
#: Pixels ``(batch, 3, size, size)`` in uint8, in channels-last layout, and a class for each.
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Pass:
    """One way through a split: batch i is ``order[i * batch : (i + 1) * batch]``; a process reads its share of it."""

    split: str
    epoch: int
    order: Tensor
    batch: int
    rank: int = 0
    world: int = 1
    limit: int | None = None  #: at most so many batches

    def __len__(self) -> int:
        count = -(-len(self.order) // self.batch)
        return count if self.limit is None else min(count, self.limit)

    def size(self, index: int) -> int:
        """Images of batch ``index`` over all processes."""
        return min(self.batch, len(self.order) - index * self.batch)

    def keys(self, index: int) -> list[Key]:
        """This process's share; nothing where a last batch has fewer images than there are processes."""
        whole = self.order[index * self.batch : (index + 1) * self.batch]
        return [(self.split, self.epoch, number) for number in whole[self.rank :: self.world].tolist()]


class Views(Dataset[tuple[Tensor, int]]):
    """The images as they are shown: "train" in random crops, others in their middle."""

    def __init__(self, folders: Mapping[str, ImageFolder], seed: int, size: int, shorter: int) -> None:
        self.folders, self.seed, self.size, self.shorter = dict(folders), seed, size, shorter

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        split, epoch, index = key
        folder = self.folders[split]
        image = decode(folder.path(index))
        if split == "train":
            view = random_view(image, self.size, stream(self.seed, epoch, f"view {index}"))
        else:
            view = centre_view(image, self.size, self.shorter)
        return pixels(view), int(folder.labels[index])


class Batches:
    """Reads the passes over some views, one at a time, in any order but fastest in their own."""

    def __init__(self, views: Views, workers: int, pinned: bool) -> None:
        self._plan = _Plan()
        self._loader = DataLoader(
            views,
            batch_sampler=self._plan,
            num_workers=workers,
            collate_fn=_stacked,
            pin_memory=pinned,
            persistent_workers=workers > 0,
            worker_init_fn=_leave_interrupts_to_the_trainer,
            # else each pass would draw its seed from torch's generator, whose state is the run's
            generator=torch.Generator(),
        )
        self._walk: Iterator[Batch] | None = None
        self._next = 0

    def read(self, which: Pass, index: int) -> Batch:
        """Batch ``index`` of a pass; nothing before it is decoded."""
        if self._walk is None or self._plan.which is not which or self._next != index:
            self._plan.which, self._plan.start = which, index
            self._walk = iter(self._loader)
        self._next = index + 1
        try:
            return next(self._walk)
        except DataError as error:
            # a worker's error arrives with its traceback as its message; the last line is what it said
            raise DataError(str(error).strip().rpartition("DataError: ")[2]) from None


class _Plan(Sampler[list[Key]]):
    """What the loader hands out to its workers: a pass, from some batch on."""

    def __init__(self) -> None:
        self.which: Pass | None = None
        self.start = 0

    def __iter__(self) -> Iterator[list[Key]]:
        which = self.which
        if which is not None:
            for index in range(self.start, len(which)):
                if keys := which.keys(index):
                    yield keys


def _stacked(items: list[tuple[Tensor, int]]) -> Batch:
    images = torch.stack([image for image, _ in items])
    return images.permute(0, 3, 1, 2), torch.tensor([label for _, label in items])


def _leave_interrupts_to_the_trainer(worker: int) -> None:
    """A Ctrl-C reaches every process of the terminal; the run is saved by the one that trains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
