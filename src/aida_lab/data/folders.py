"""Images in class folders, ``SPLIT/CLASS/*.JPEG``: list, decode, crop and resize them, and read them in batches.

Crops and resizes give the same bits as torchvision on Pillow images, because published ImageNet results depend on them.
The images of a batch and their crops depend only on (seed, epoch, image), not on the number of worker processes, which
read ahead, or on the first batch that was read.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from aida_lab.data import local
from aida_lab.data.local import DataError, Root
from aida_lab.data.sets import DataSet
from aida_lab.task import stream

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

#: Ranges of a random crop: its share of the image's area, and its width divided by its height.
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)

#: Split, epoch and image index: everything that a worker gets.
Key = tuple[str, int, int]
#: Pixels ``(batch, 3, size, size)`` in uint8 and channels-last memory format, and one class per image.
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ImageFolder:
    """The images of a split, sorted by class and name. The label is the index of the class among the sorted names.

    All names are in one bytes object. A million Python strings would be copied into every worker process page by page,
    because their reference counts change.
    """

    root: Path
    names: bytes
    starts: Tensor  #: image i is ``names[starts[i] : starts[i + 1]]``, below the root
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        start, end = self.starts[index : index + 2].tolist()
        return self.root / os.fsdecode(self.names[start:end])


def image_folder(data: DataSet, split: str, root: Root = None) -> ImageFolder:
    """A split in the ImageNet folder layout. :class:`DataError` if it is incomplete."""
    require_pillow()
    assert data.tree is not None
    there = local.require(data, root) / split
    names: list[bytes] = []
    labels: list[int] = []
    for number, (label, found) in enumerate(local.class_folders(there)):
        names += [os.fsencode(os.path.join(label, name)) for name in found]
        labels += [number] * len(found)
    if len(names) != (wanted := data.tree.images[split]):
        raise DataError(
            f"{data.title}: {there} has {len(names):,} images instead of {wanted:,}; "
            f"fix it with: {local.fix_command(data, root)}"
        )
    starts = torch.tensor([0, *map(len, names)]).cumsum(0)
    return ImageFolder(there, b"".join(names), starts, torch.tensor(labels))


def require_pillow() -> None:
    """Raise a clear error in this process, before worker processes start."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "reading JPEG files needs Pillow: pip install '.[data]' in a clone (or: pip install pillow)", name="PIL"
        ) from None


def decode(path: Path) -> Picture:
    """The image in RGB. Some ImageNet images are grey and a few are CMYK."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            picture: Picture = image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"{path} cannot be decoded ({error}); replace it with the file from the official archive"
        ) from None
    return picture


def random_resized_crop(image: Picture, size: int, chance: torch.Generator) -> Picture:
    """A random crop, resized to a square and mirrored with probability 1/2."""
    from PIL import Image

    left, top, width, height = random_crop_box(image.width, image.height, chance)
    # crop first: Pillow's resize with a box reads pixels outside of the box
    crop = image.crop((left, top, left + width, top + height))
    view = crop.resize((size, size), Image.Resampling.BILINEAR)
    mirrored = float(torch.rand((), generator=chance)) < 0.5
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else view


def random_crop_box(width: int, height: int, chance: torch.Generator) -> tuple[int, int, int, int]:
    """Left, top, width and height of a crop: uniform area, log-uniform aspect ratio, ten attempts."""
    for _ in range(10):
        area = width * height * _uniform(*AREA, chance)
        ratio = math.exp(_uniform(math.log(RATIO[0]), math.log(RATIO[1]), chance))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            top = int(torch.randint(height - down + 1, (), generator=chance))
            left = int(torch.randint(width - across + 1, (), generator=chance))
            return left, top, across, down
    # no attempt fits, for example in a very long image: the largest central crop
    across, down = width, height
    if width / height < RATIO[0]:
        down = round(width / RATIO[0])
    elif width / height > RATIO[1]:
        across = round(height * RATIO[1])
    return (width - across) // 2, (height - down) // 2, across, down


def resize_and_centre_crop(image: Picture, size: int, shorter: int) -> Picture:
    """Resize the shorter side to ``shorter``, then crop the central square."""
    from PIL import Image

    if image.width <= image.height:
        width, height = shorter, int(shorter * image.height / image.width)
    else:
        width, height = int(shorter * image.width / image.height), shorter
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return resized.crop((left, top, left + size, top + size))


def pixels(image: Picture) -> Tensor:
    """uint8 ``(height, width, 3)``."""
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


def _uniform(low: float, high: float, chance: torch.Generator) -> float:
    return float(torch.empty(()).uniform_(low, high, generator=chance))


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over a split. Batch i is ``order[i * batch : (i + 1) * batch]``; each process reads its share of it."""

    split: str
    epoch: int
    order: Tensor
    batch: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch)

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
        self._keys = _Keys()
        self._loader = DataLoader(
            views,
            batch_sampler=self._keys,
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
        if self._walk is None or self._keys.which is not which or self._next != index:
            self._keys.which, self._keys.start = which, index
            self._walk = iter(self._loader)
        self._next = index + 1
        try:
            return next(self._walk)
        except DataError as error:
            # the message of a worker's error contains its traceback; the last line is the original message
            raise DataError(str(error).strip().rpartition("DataError: ")[2]) from None


class _Keys(Sampler[list[Key]]):
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
