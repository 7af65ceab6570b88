"""Images as uint8 tensors: the official binary CIFAR files, and scikit-learn's digits."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from aida_lab.data import local, sets
from aida_lab.data.errors import DataError

#: Mean and standard deviation of the public code, for both CIFAR-10 and CIFAR-100.
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2023, 0.1994, 0.2010)

#: scikit-learn's digits have no split: the first 1,500 are for training, the other 297 for testing.
DIGITS_TRAIN = 1500


@dataclass(frozen=True)
class Images:
    """Pixels (count, channels, height, width) in uint8, and one class per image."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageSplits:
    train: Images
    test: Images
    classes: int


def cifar10(root: str | os.PathLike[str] | None = None) -> ImageSplits:
    """50,000 training and 10,000 test images of ten classes."""
    data = sets.CIFAR10
    names = [file.name for file in data.files if file.name != "test_batch.bin"]
    train = [_records(data, name, root, label_bytes=1, classes=10) for name in names]
    return ImageSplits(
        Images(torch.cat([each.pixels for each in train]), torch.cat([each.labels for each in train])),
        _records(data, "test_batch.bin", root, label_bytes=1, classes=10),
        classes=10,
    )


def cifar100(root: str | os.PathLike[str] | None = None) -> ImageSplits:
    """50,000 training and 10,000 test images, with the 100 fine classes."""
    data = sets.CIFAR100
    train, test = (_records(data, name, root, label_bytes=2, classes=100) for name in ("train.bin", "test.bin"))
    return ImageSplits(train, test, classes=100)


def digits() -> ImageSplits:
    """1,500 training and 297 test images of 8 x 8 pixels, grey levels 0 to 16."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn: pip install '.[lab]' in a clone", name="sklearn"
        ) from None

    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels).to(torch.uint8).view(-1, 1, 8, 8)
    classes = torch.as_tensor(labels).long()
    return ImageSplits(
        Images(images[:DIGITS_TRAIN], classes[:DIGITS_TRAIN]),
        Images(images[DIGITS_TRAIN:], classes[DIGITS_TRAIN:]),
        classes=10,
    )


def _records(
    data: sets.DataSet, name: str, root: str | os.PathLike[str] | None, *, label_bytes: int, classes: int
) -> Images:
    """Records of one or two label bytes and three 32 x 32 planes. The second label is the fine one."""
    content = torch.frombuffer(local.read(data, name, root), dtype=torch.uint8).view(-1, label_bytes + 3072)
    labels = content[:, label_bytes - 1].long()
    if int(labels.max()) >= classes:
        raise DataError(
            f"{data.title}: {name} has the label {int(labels.max())}, but there are {classes} classes; "
            f"fix it with: {local.fix_command(data, root)}"
        )
    return Images(content[:, label_bytes:].reshape(-1, 3, 32, 32), labels)
