"""CIFAR as a task: crops and flips against a literal transcription, the loss, and short runs on the real images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from aida_lab.data import images, sets
from aida_lab.experiments import find_experiment
from aida_lab.request import RunRequest
from aida_lab.task import TaskContext
from aida_lab.tasks.classification import PADDING, Classification, Crops, cut
from aida_lab.training.options import Options
from aida_lab.training.run import run
from real_data import needs

EXPERIMENTS = ("vgg11-cifar10", "vgg11-cifar100", "resnet34-cifar10", "resnet34-cifar100")


def pictures(count: int) -> images.Images:
    chance = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=chance)
    return images.Images(pixels, torch.arange(count) % 10)


def task(augment: bool = True, **changes: object) -> Classification:
    spec = replace(RunRequest(find_experiment("vgg11-cifar10")).specs()[0], batch=4, **changes)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    splits = images.ImageSplits(pictures(10), pictures(6), classes=10)
    context = TaskContext(spec, torch.device("cpu"))
    return Classification(context, model, splits, images.CIFAR_MEAN, images.CIFAR_STD, augment=augment)


def test_a_crop_is_cut_from_the_padded_image_and_mirrored_afterwards() -> None:
    source = pictures(7).pixels
    crops = Crops.draw(7, seed=3, epoch=5, augment=True)
    padded = functional.pad(source.permute(0, 2, 3, 1), (0, 0, *(PADDING,) * 4))
    found = cut(padded, 32, crops)
    for place, (index, row, column, mirrored) in enumerate(
        zip(crops.order, crops.rows, crops.columns, crops.mirrored, strict=True)
    ):
        black = torch.zeros(3, 40, 40, dtype=torch.uint8)
        black[:, 4:36, 4:36] = source[index]
        expected = black[:, row : row + 32, column : column + 32]
        assert torch.equal(found[place], expected.flip(2) if mirrored else expected)


def test_crops_are_drawn_for_each_image_and_use_the_whole_range() -> None:
    crops = Crops.draw(2000, seed=0, epoch=0, augment=True)
    assert sorted(crops.order.tolist()) == list(range(2000))
    assert set(crops.rows.tolist()) == set(crops.columns.tolist()) == set(range(9))
    assert not torch.equal(crops.rows, crops.columns)
    assert 900 < int(crops.mirrored.sum()) < 1100


def test_orders_differ_between_epochs_and_seeds_and_repeat_within() -> None:
    draws = [Crops.draw(50, seed, epoch, True).order.tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert draws[0] == draws[3]
    assert draws[0] != draws[1]
    assert draws[0] != draws[2]


def test_an_epoch_shows_every_image_once_and_keeps_the_last_batch() -> None:
    made = task(augment=False)
    assert made.begin_epoch(0) == 3
    assert [made.kind(index) for index in range(3)] == ["4", "4", "2"]
    shown = torch.cat([made.batch(index)[0] for index in range(3)])
    assert {tuple(image.flatten().tolist()) for image in shown} == {
        tuple(image.flatten().tolist()) for image in pictures(10).pixels
    }


def test_the_loss_is_plain_cross_entropy_of_normalised_images() -> None:
    made = task(augment=False)
    made.begin_epoch(0)
    pixels, labels = made.batch(0)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (images.CIFAR_MEAN, images.CIFAR_STD))
    logits = made.modules["model"]((pixels / 255 - mean) / std)
    expected = functional.cross_entropy(logits, labels)
    optimizer = torch.optim.SGD(made.modules["model"].parameters(), lr=0.0)
    torch.testing.assert_close(made.step("4", (pixels, labels), {"model": optimizer}), expected.detach())


def test_accuracy_is_measured_on_the_test_images_without_augmentation() -> None:
    made = task()
    test = pictures(6)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (images.CIFAR_MEAN, images.CIFAR_STD))
    with torch.no_grad():
        logits = made.modules["model"]((test.pixels / 255 - mean) / std)
    found = made.evaluate(final=False)
    assert found["accuracy"] == pytest.approx(100 * (logits.argmax(1) == test.labels).float().mean().item())
    assert found["test_loss"] == pytest.approx(functional.cross_entropy(logits, test.labels).item(), rel=1e-5)


def test_cifar100_is_declared_like_cifar10() -> None:
    for name in EXPERIMENTS:
        experiment = find_experiment(name)
        assert (experiment.epochs, experiment.batch, experiment.table) == (200, 128, "III")
        assert experiment.tuned("sgd")["weight_decay"] == 5e-4
        assert experiment.tuned("adamw")["weight_decay"] == 1e-2
        assert len(experiment.paper) == 11


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(sets.find(find_experiment(name).data[0]))) for name in EXPERIMENTS]
)
def test_a_short_run_on_the_real_images(name: str, tmp_path: Path) -> None:
    spec = RunRequest(find_experiment(name), epochs=1, limit=1).specs()[0]
    result = run(spec, tmp_path, Options(device="cpu"))
    assert result["state"] == "finished"
    assert result["steps"] == 1
    assert 0 <= result["last"] <= 100
