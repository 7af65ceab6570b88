"""Small images in class folders, a small net, and what one of two processes does with them (when run as a script)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from aida_lab import distributed
from aida_lab.data.sets import DataSet, ImageTree
from aida_lab.spec import RunSpec
from aida_lab.task import Task, TaskContext
from aida_lab.tasks.image_folder import ImageFolders

CLASSES, SIZE = 3, 16


class SmallNet(nn.Module):
    """A net without batch norm; beside it counters that a process fills on its own, as it does running statistics."""

    filled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2)
        self.fc = nn.Linear(8, CLASSES)
        self.register_buffer("filled", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.convolution(images).relu().mean((2, 3)))
        return logits


def grow(root: Path, train: int, val: int) -> DataSet:
    """So many images a class under ``root``, of different sizes and colours."""
    from PIL import Image

    images = {"train": train * CLASSES, "val": val * CLASSES}
    data = DataSet("tree", "a tree", "", folder="tree", tree=ImageTree(CLASSES, MappingProxyType(images)))
    chance = torch.Generator().manual_seed(0)
    for split, count in (("train", train), ("val", val)):
        for label in range(CLASSES):
            folder = root / data.folder / split / f"n{label:04d}"
            folder.mkdir(parents=True)
            for number in range(count):
                width, height = torch.randint(18, 40, (2,), generator=chance).tolist()
                levels = torch.randint(40, 120, (height, width, 3), generator=chance)
                levels[..., label] += 80
                Image.fromarray(levels.to(torch.uint8).numpy()).save(folder / f"{number}.JPEG", quality=95)
    return data


def spec(**values: object) -> RunSpec:
    given = {"experiment": "tree", "seed": 0, "epochs": 1, "batch": 6, "precision": "fp32", **values}
    return RunSpec(optimizer="sgd", hyper={}, **given)  # type: ignore[arg-type]


def trained_losses(task: Task, optimizer: Optimizer, steps: Iterable[int]) -> list[float]:
    return [float(task.step(task.kind(index), task.batch(index), {"model": optimizer})) for index in steps]


def main(root: Path) -> None:
    """Train four steps with the other process and print losses, measures, and what must be the same in both."""
    torch.set_num_threads(1)
    images = {"train": 7 * CLASSES, "val": 4 * CLASSES}
    data = DataSet("tree", "a tree", "", folder="tree", tree=ImageTree(CLASSES, MappingProxyType(images)))
    device = distributed.join(torch.device("cpu"))
    assert distributed.world() == 2
    assert distributed.is_main() == (distributed.rank() == 0)
    # each its own start: the main process's must win
    torch.manual_seed(3 + distributed.rank())
    context = TaskContext(spec(), device, data_root=root, workers=0)
    task = ImageFolders(context, SmallNet(), data, size=SIZE, shorter=SIZE + 8)
    model = task.modules["model"]
    assert isinstance(model, SmallNet)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    task.begin_epoch(0)
    said = trained_losses(task, optimizer, range(4))
    model.filled.fill_(1.0 + distributed.rank())
    said += task.evaluate(final=True).values()
    said += [float(model.fc.weight.detach().double().norm()), float(model.filled)]
    torch.distributed.barrier()
    print(*said)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
