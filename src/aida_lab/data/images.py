"""Images as uint8 tensors: the official binary CIFAR files, and scikit-learn's digits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aida_lab.data import local, sets
from aida_lab.data.local import DataError

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


def cifar10(root: local.Root = None) -> ImageSplits:
    """50,000 training and 10,000 test images of ten classes."""
    return _cifar(sets.CIFAR10, root, label_bytes=1, classes=10)


def cifar100(root: local.Root = None) -> ImageSplits:
    """50,000 training and 10,000 test images, with the 100 fine classes."""
    return _cifar(sets.CIFAR100, root, label_bytes=2, classes=100)


def digits() -> ImageSplits:
    """1,500 training and 297 test images of 8 x 8 pixels, grey levels 0 to 16."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn: pip install '.[lab]' in a clone", name="sklearn"
        ) from None

    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels).to(torch.uint8).view(-1, 1, 8, 8).tensor_split([DIGITS_TRAIN])
    classes = torch.as_tensor(labels).long().tensor_split([DIGITS_TRAIN])
    train, test = map(Images, images, classes)
    return ImageSplits(train, test, classes=10)


def _cifar(data: sets.DataSet, root: local.Root, *, label_bytes: int, classes: int) -> ImageSplits:
    """Records of one or two label bytes and three 32 x 32 planes. The second label is the fine one."""
    parts = []
    for file in data.files:
        content = torch.frombuffer(local.read(data, file.name, root), dtype=torch.uint8).view(-1, label_bytes + 3072)
        highest = int(content[:, label_bytes - 1].max())
        if highest >= classes:
            raise DataError(
                f"{data.title}: {file.name} has the label {highest}, but there are {classes} classes; "
                f"fix it with: {local.fix_command(data, root)}"
            )
        parts.append(content)
    # the last file holds the test images
    train, test = (
        Images(
            torch.cat([part[:, label_bytes:] for part in rows]).view(-1, 3, 32, 32),
            torch.cat([part[:, label_bytes - 1] for part in rows]).long(),
        )
        for rows in (parts[:-1], parts[-1:])
    )
    return ImageSplits(train, test, classes)
