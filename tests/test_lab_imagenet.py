"""ResNet18 on ImageNet: folders, crops, batches by number, one and two processes; a short run on real images."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from aida_lab import distributed
from aida_lab.data import DataError, folders, sets
from aida_lab.data.folders import (
    Batches,
    Pass,
    Views,
    image_folder,
    pixels,
    random_crop_box,
    random_resized_crop,
    resize_and_centre_crop,
)
from aida_lab.data.sets import DataSet
from aida_lab.experiments import find_experiment
from aida_lab.task import TaskContext
from aida_lab.tasks.image_folder import ImageFolders
from image_trees import CLASSES, SIZE, SmallNet, grow, spec, trained_losses
from lab_cases import one_thread_and_a_seed
from real_data import needs

image_module = pytest.importorskip("PIL.Image", reason="pip install pillow")

same_start = pytest.fixture(autouse=True)(one_thread_and_a_seed)


@pytest.fixture
def tree(tmp_path: Path) -> DataSet:
    return grow(tmp_path, train=7, val=4)


def views(data: DataSet, root: Path, seed: int = 0) -> Views:
    return Views({split: image_folder(data, split, root) for split in ("train", "val")}, seed, SIZE, SIZE + 8)


def picture(width: int, height: int) -> object:
    """Red grows to the right, green downwards."""
    across = torch.arange(width, dtype=torch.float32).mul(255 / max(width - 1, 1)).expand(height, width)
    down = torch.arange(height, dtype=torch.float32).mul(255 / max(height - 1, 1))[:, None].expand(height, width)
    planes = torch.stack([across, down, torch.zeros(height, width)], -1).to(torch.uint8)
    return image_module.fromarray(planes.numpy())


# -- folders -------------------------------------------------------------------------------------


def test_images_are_listed_by_class_and_name(tree: DataSet, tmp_path: Path) -> None:
    found = image_folder(tree, "train", tmp_path)
    paths = [found.path(index) for index in range(len(found))]
    assert paths == sorted((tmp_path / tree.folder / "train").glob("*/*.JPEG"))
    assert found.labels.tolist() == [label for label in range(CLASSES) for _ in range(7)]


def test_an_incomplete_split_and_an_undecodable_image_are_named(tree: DataSet, tmp_path: Path) -> None:
    found = image_folder(tree, "val", tmp_path)
    found.path(3).write_bytes(found.path(3).read_bytes()[:100])
    with pytest.raises(DataError, match=rf"{found.path(3).name} cannot be decoded .*; replace it with the file"):
        folders.decode(found.path(3))
    found.path(3).unlink()
    with pytest.raises(DataError, match=r"val has 11 images instead of 12; fix it with: aida data import"):
        image_folder(tree, "val", tmp_path)


def test_grey_images_become_colour(tmp_path: Path) -> None:
    image_module.new("L", (5, 4), 77).save(tmp_path / "grey.JPEG")
    assert pixels(folders.decode(tmp_path / "grey.JPEG")).tolist() == torch.full((4, 5, 3), 77).tolist()


def test_a_missing_pillow_is_named_with_the_command_that_installs_it(
    tree: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[data\]' in a clone \(or: pip install pillow\)"):
        image_folder(tree, "train", tmp_path)


# -- crops ---------------------------------------------------------------------------------------


def test_random_crops_stay_within_their_areas_and_ratios() -> None:
    width, height = 400, 400
    boxes = torch.tensor(
        [random_crop_box(width, height, torch.Generator().manual_seed(seed)) for seed in range(2000)],
        dtype=torch.float64,
    )
    left, top, across, down = boxes.T
    assert bool(((left >= 0) & (top >= 0) & (left + across <= width) & (top + down <= height)).all())
    area, ratio = across * down / (width * height), (across / down).log()
    assert 0.08 < float(area.min()) + 0.003 < 0.1
    assert float(area.max()) > 0.95
    assert float(ratio.abs().max()) < math.log(4 / 3) + 0.02
    # uniform between the bounds but for the boxes that did not fit, which are the large ones
    assert 0.4 < float(area.mean()) < 0.54
    assert abs(float(ratio.mean())) < 0.02


@pytest.mark.parametrize(("width", "height", "box"), [(600, 30, (280, 0, 40, 30)), (30, 600, (0, 280, 30, 40))])
def test_an_image_too_long_for_any_crop_gives_its_central_crop(
    width: int, height: int, box: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "AREA", (0.9, 1.0))
    assert random_crop_box(width, height, torch.Generator().manual_seed(0)) == box


def test_a_random_crop_shows_its_box_as_a_square() -> None:
    shown = set()
    for seed in range(40):
        left, top, width, height = random_crop_box(200, 100, torch.Generator().manual_seed(seed))
        view = pixels(random_resized_crop(picture(200, 100), 32, torch.Generator().manual_seed(seed))).float()  # type: ignore[arg-type]
        assert view.shape == (32, 32, 3)
        ends = sorted([float(view[:, 0, 0].mean()), float(view[:, -1, 0].mean())])
        assert ends == pytest.approx([left / 199 * 255, (left + width - 1) / 199 * 255], abs=0.02 * 255 + 2)
        assert float(view[0, :, 1].mean()) == pytest.approx(top / 99 * 255, abs=0.02 * 255 + 2)
        assert float(view[-1, :, 1].mean()) == pytest.approx((top + height - 1) / 99 * 255, abs=0.02 * 255 + 2)
        shown.add(bool(view[0, 0, 0] > view[0, -1, 0]))
    assert shown == {True, False}  # mirrored and not


@pytest.mark.parametrize(("width", "height"), [(400, 300), (300, 400), (256, 256), (224, 224), (100, 900)])
def test_the_central_crop_follows_a_resize_of_the_shorter_side_to_256(width: int, height: int) -> None:
    view = pixels(resize_and_centre_crop(picture(width, height), 224, 256)).float()  # type: ignore[arg-type]
    assert view.shape == (224, 224, 3)
    scale = 256 / min(width, height)
    for channel, side in ((0, width), (1, height)):
        plane = view[..., channel].mean(channel)  # over the other direction
        span = 224 / (side * scale)
        assert float(plane[0]) == pytest.approx((1 - span) / 2 * 255, abs=4)
        assert float(plane[-1]) == pytest.approx((1 + span) / 2 * 255, abs=4)


# -- batches -------------------------------------------------------------------------------------


def test_pixels_depend_neither_on_workers_nor_on_the_first_batch_read(tree: DataSet, tmp_path: Path) -> None:
    order = torch.randperm(21)
    way = Pass("train", 3, order, batch=4)
    alone = Batches(views(tree, tmp_path), workers=0, pinned=False)
    whole = [alone.read(way, index) for index in range(len(way))]
    assert [len(labels) for _, labels in whole] == [4, 4, 4, 4, 4, 1]
    assert torch.cat([labels for _, labels in whole]).tolist() == (order // 7).tolist()
    assert whole[0][0].is_contiguous(memory_format=torch.channels_last)
    helped = Batches(views(tree, tmp_path), workers=2, pinned=False)
    # one after another, a jump back, a jump on, another pass between: whatever was read ahead is dropped
    middles = Pass("val", 0, torch.arange(12), batch=5)
    for which, index in [(way, 2), (way, 3), (way, 0), (middles, 0), (middles, 1), (way, 4), (way, 5)]:
        images, labels = helped.read(which, index)
        expected = alone.read(which, index)
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])
    for index in (1, 2, 3):
        assert torch.equal(helped.read(way, index)[0], whole[index][0])


def test_batches_before_the_first_requested_one_are_not_decoded(
    tree: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    decode = folders.decode
    monkeypatch.setattr(folders, "decode", lambda path: (opened.append(path.name), decode(path))[1])
    shown = views(tree, tmp_path)
    Batches(shown, workers=0, pinned=False).read(Pass("train", 0, torch.arange(21), batch=4), 4)
    assert opened == [shown.folders["train"].path(index).name for index in range(16, 20)]


def test_crops_depend_on_epoch_and_seed_and_repeat_for_the_same_ones(tree: DataSet, tmp_path: Path) -> None:
    def view(seed: int, epoch: int, split: str = "train") -> Tensor:
        return views(tree, tmp_path, seed)[split, epoch, 5][0]

    assert torch.equal(view(0, 0), view(0, 0))
    assert not torch.equal(view(0, 0), view(0, 1))
    assert not torch.equal(view(0, 0), view(1, 0))
    assert torch.equal(view(0, 0, "val"), view(1, 1, "val"))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_undecodable_image_is_a_one_line_error(tree: DataSet, tmp_path: Path, workers: int) -> None:
    shown = views(tree, tmp_path)
    broken = shown.folders["train"].path(1)
    broken.write_bytes(b"no image")
    with pytest.raises(DataError) as caught:
        Batches(shown, workers, pinned=False).read(Pass("train", 0, torch.arange(4), batch=4), 0)
    assert str(caught.value).startswith(f"{broken} cannot be decoded (")
    assert "\n" not in str(caught.value)


def test_reading_does_not_change_torchs_generator(tree: DataSet, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    Batches(views(tree, tmp_path), workers=1, pinned=False).read(Pass("train", 0, torch.arange(4), batch=2), 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_shares_of_the_processes_are_the_batch(world: int) -> None:
    order = torch.randperm(22)
    ways = [Pass("train", 0, order, 7, rank, world) for rank in range(world)]
    for index in range(len(ways[0])):
        shared = [key for way in ways for key in way.keys(index)]
        assert len(shared) == ways[0].size(index) == (7, 7, 7, 1)[index]
        assert sorted(number for _, _, number in shared) == sorted(order[7 * index : 7 * index + 7].tolist())


# -- the task ------------------------------------------------------------------------------------


def task_at(data: DataSet, root: Path, device: str = "cpu", **values: object) -> ImageFolders:
    torch.manual_seed(3)
    context = TaskContext(spec(**values), torch.device(device), data_root=root, workers=0)
    return ImageFolders(context, SmallNet(), data, size=SIZE, shorter=SIZE + 8)


def test_a_run_resumes_in_the_middle_of_an_epoch(tree: DataSet, tmp_path: Path) -> None:
    task = task_at(tree, tmp_path)
    assert task.begin_epoch(2) == 4
    assert [task.kind(index) for index in range(4)] == ["6", "6", "6", "3"]
    optimizer = SGD(task.modules["model"].parameters(), lr=0.1, momentum=0.9)
    whole = trained_losses(task, optimizer, range(4))

    first = task_at(tree, tmp_path)
    first.begin_epoch(2)
    start = SGD(first.modules["model"].parameters(), lr=0.1, momentum=0.9)
    part = trained_losses(first, start, range(2))
    second = task_at(tree, tmp_path)
    second.modules["model"].load_state_dict(first.modules["model"].state_dict())
    end = SGD(second.modules["model"].parameters(), lr=0.1, momentum=0.9)
    end.load_state_dict(start.state_dict())
    second.load_extra_state(first.extra_state())
    second.begin_epoch(2)
    assert part + trained_losses(second, end, range(2, 4)) == whole


def test_the_step_descends_the_mean_cross_entropy_of_normalised_images(tree: DataSet, tmp_path: Path) -> None:
    task = task_at(tree, tmp_path)
    task.begin_epoch(0)
    images, labels = task.batch(3)
    mean, std = torch.tensor(folders.IMAGENET_MEAN), torch.tensor(folders.IMAGENET_STD)
    inputs = (images / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    model = SmallNet()
    model.load_state_dict(task.modules["model"].state_dict())
    expected = functional.cross_entropy(model(inputs), labels)
    expected.backward()
    found = task.step("3", (images, labels), {"model": SGD(task.modules["model"].parameters(), lr=0.5)})
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    for old, new in zip(model.parameters(), task.modules["model"].parameters(), strict=True):
        assert old.grad is not None
        torch.testing.assert_close(new.detach(), old.detach() - 0.5 * old.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("limit", "chosen"), [(None, range(12)), (1, range(0, 12, 2))])
def test_accuracy_and_loss_are_those_of_the_central_crops(
    tree: DataSet, tmp_path: Path, limit: int | None, chosen: range
) -> None:
    task = task_at(tree, tmp_path, limit=limit)
    assert task.begin_epoch(0) == (4 if limit is None else limit)
    model, shown = task.modules["model"], views(tree, tmp_path)
    inputs = torch.stack([shown["val", 0, index][0] for index in chosen]).permute(0, 3, 1, 2)
    labels = torch.tensor([shown["val", 0, index][1] for index in chosen])
    mean, std = torch.tensor(folders.IMAGENET_MEAN), torch.tensor(folders.IMAGENET_STD)
    with torch.no_grad():
        logits = model((inputs / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    found = task.evaluate(final=False)
    assert found["accuracy"] == pytest.approx(100 * float((logits.argmax(1) == labels).float().mean()))
    assert found["valid_loss"] == pytest.approx(float(functional.cross_entropy(logits, labels)), rel=1e-5)
    assert model.training


def test_bfloat16_works_on_a_cpu(tree: DataSet, tmp_path: Path) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        task = task_at(tree, tmp_path, precision=precision)
        task.begin_epoch(0)
        losses[precision] = trained_losses(task, SGD(task.modules["model"].parameters(), lr=0.01), range(2))
        task.evaluate(final=False)
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)


@pytest.mark.gpu
def test_a_gpu_sees_the_same_images(tree: DataSet, tmp_path: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        task = task_at(tree, tmp_path, device)
        task.begin_epoch(0)
        losses = trained_losses(task, SGD(task.modules["model"].parameters(), lr=0.01), range(4))
        found.append([*losses, *task.evaluate(final=True).values()])
    assert found[1] == pytest.approx(found[0], rel=1e-2)  # cuDNN may use TF32


# -- several processes -----------------------------------------------------------------------------


def in_two_processes(script: Path, *arguments: str) -> list[str]:
    """What each of two processes printed; they find each other as under torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, **together, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], [errors[-2000:] for _, errors in ended]
    return [output for output, _ in ended]


@pytest.mark.slow
def test_two_processes_train_as_one_does_on_the_same_batches(tree: DataSet, tmp_path: Path) -> None:
    """Without batch norm, which sees a process's part: a last batch of 3 images is shared as 2 and 1."""
    task = task_at(tree, tmp_path)
    task.begin_epoch(0)
    optimizer = SGD(task.modules["model"].parameters(), lr=0.1, momentum=0.9)
    alone = [*trained_losses(task, optimizer, range(4)), *task.evaluate(final=True).values()]
    script = Path(__file__).with_name("image_trees.py")
    both = [[float(word) for word in said.split()] for said in in_two_processes(script, str(tmp_path))]
    assert both[0][:6] == both[1][:6]
    assert both[0][:6] == pytest.approx(alone, rel=1e-5)
    # weights after the last step, and the running statistics that a batch norm beside the net was left with
    norm = float(task.modules["model"].get_parameter("fc.weight").detach().double().norm())
    assert both[0][6] == both[1][6] == pytest.approx(norm, rel=1e-5)
    assert both[0][7] == both[1][7] == 1.0


def test_a_batch_with_fewer_images_than_processes_is_an_error(
    tree: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_at(tree, tmp_path, batch=10)
    monkeypatch.setattr(distributed, "world", lambda: 2)
    with pytest.raises(ValueError, match="the last batch of an epoch has 1 images for 2 processes; start fewer"):
        task.begin_epoch(0)


def test_one_process_alone_is_the_main_one_and_changes_nothing() -> None:
    value = torch.tensor([1.0, 2.0])
    assert distributed.join(torch.device("cpu")) == torch.device("cpu")
    assert (distributed.rank(), distributed.world(), distributed.is_main()) == (0, 1, True)
    distributed.broadcast_tensors([value])
    assert distributed.mean(distributed.total(value)) is value
    assert value.tolist() == [1.0, 2.0]


# -- the experiment ------------------------------------------------------------------------------


def test_the_declaration_is_that_of_the_paper() -> None:
    experiment = find_experiment("resnet18-imagenet")
    assert (experiment.epochs, experiment.batch, experiment.table) == (90, 256, "V")
    factors = [experiment.schedule.factor(epoch, 0, 90) for epoch in (0, 69, 70, 79, 80, 89)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert sets.IMAGENET.tree is not None
    assert -(-sets.IMAGENET.tree.images["train"] // 256) == experiment.probe_every == 5005
    assert {variant: experiment.reads(variant) for variant in experiment.variants} == {
        "default": ("imagenet",),
        "sample": ("imagenet-sample",),
    }
    paper = {method: (figure.mean, figure.std) for method, figure in experiment.paper.items()}
    assert paper == {"adabelief": (69.65, 0.06), "aida-k2": (69.70, 0.08)}
    tuned: Mapping[str, object] = experiment.tuned("aida")
    assert (tuned["eps"], tuned["weight_decay"], tuned["decoupled_weight_decay"]) == (1e-9, 1e-2, True)


@pytest.mark.slow
@needs(sets.IMAGENET_SAMPLE)
def test_a_short_run_on_real_images() -> None:
    experiment = find_experiment("resnet18-imagenet")
    run = spec(experiment=experiment.name, variant="sample", batch=8, limit=2)
    torch.manual_seed(0)
    task = experiment.task(TaskContext(run, torch.device("cpu"), workers=1))
    model = task.modules["model"]
    assert isinstance(model, nn.Module)
    assert sum(p.numel() for p in model.parameters()) == experiment.parameters
    assert task.begin_epoch(0) == 2
    losses = trained_losses(task, SGD(model.parameters(), lr=0.01), range(2))
    assert losses[0] == pytest.approx(math.log(1000), abs=1.0)
    found = task.evaluate(final=True)
    assert 0 <= found["accuracy"] <= 100
    assert math.isfinite(found["valid_loss"])
