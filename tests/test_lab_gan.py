"""WGAN-GP: its steps against a literal transcription, its images, its measure; and a short run on the real CIFAR-10."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, autograd, nn
from torch.optim import SGD, Optimizer

from aida_lab.data import DataError, sets
from aida_lab.data.sets import DataFile
from aida_lab.experiments import find_experiment
from aida_lab.frechet import efficientnet
from aida_lab.frechet.networks import FeatureNetwork
from aida_lab.models.wgan import NOISE, Critic, Generator
from aida_lab.spec import RunSpec
from aida_lab.task import TaskContext
from aida_lab.tasks import gan
from aida_lab.tasks.gan import WganGp, doubled, normalised
from aida_lab.training.environment import set_up
from aida_lab.training.steps import PLAIN_STEPS, GraphSteps, PlainSteps
from lab_cases import one_thread_and_a_seed
from real_data import needs

same_start = pytest.fixture(autouse=True)(one_thread_and_a_seed)

#: 25 images: at batch 4 six full batches and one of a single image.
PER_FILE = 5


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with a CIFAR-10 of a few random images."""
    small = replace(sets.CIFAR10, files=tuple(DataFile(file.name, PER_FILE * 3073) for file in sets.CIFAR10.files))
    monkeypatch.setattr(sets, "CIFAR10", small)
    folder = tmp_path / small.folder
    folder.mkdir()
    for number, file in enumerate(small.files):
        chance = torch.Generator().manual_seed(number)
        content = torch.randint(256, (PER_FILE, 3073), dtype=torch.uint8, generator=chance)
        content[:, 0] = torch.arange(PER_FILE)
        (folder / file.name).write_bytes(content.numpy().tobytes())
    return tmp_path


@pytest.fixture
def ruler(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A small feature network in the place of EfficientNet; the sizes of what it has seen."""
    seen: list[int] = []

    class Ruler(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(len(images))
            return images.unflatten(2, (4, -1)).mean((3, 4)).flatten(1)

    network = FeatureNetwork("frechet_efficientnet_lite0", "ruler", Ruler(), 64, 127.0, 128.0)
    monkeypatch.setattr(gan, "efficientnet_lite0", lambda device: network)
    return seen


def spec(**values: object) -> RunSpec:
    given = {"seed": 0, "epochs": 1, "batch": 4, "precision": "fp32", **values}
    return RunSpec("wgan-gp-cifar10", "sgd", {}, **given)  # type: ignore[arg-type]


def task_at(root: Path, device: str = "cpu", **values: object) -> WganGp:
    torch.manual_seed(7)
    return WganGp(TaskContext(spec(**values), torch.device(device), data_root=root))


def optimizers_of(task: WganGp, lr: float = 1e-3) -> dict[str, Optimizer]:
    return {name: SGD(module.parameters(), lr=lr) for name, module in task.modules.items()}


def walk(task: WganGp, optimizers: Mapping[str, Optimizer], steps: range) -> list[float]:
    return [float(task.step(task.kind(i), task.batch(i), optimizers)) for i in steps]


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


# -- images --------------------------------------------------------------------------------------


def test_images_are_enlarged_bit_by_bit_as_by_pillow() -> None:
    image = pytest.importorskip("PIL.Image", reason="pip install pillow")
    pixels = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8)
    pixels[10:] //= 16  # few levels, where rounding shows
    for small, large in zip(pixels, doubled(pixels), strict=True):
        resized = image.fromarray(small.permute(1, 2, 0).numpy()).resize((64, 64), image.Resampling.BILINEAR)
        expected = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(64, 64, 3)
        assert torch.equal(large, expected.permute(2, 0, 1))


def test_pixels_are_scaled_to_the_range_of_the_generator() -> None:
    assert normalised(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx([-1.0, -0.6, 1.0])


# -- the epoch -----------------------------------------------------------------------------------


def test_an_epoch_shows_every_image_once_in_an_order_of_its_own(root: Path, ruler: list[int]) -> None:
    task, pixels = task_at(root), []
    for epoch in (0, 1):
        assert task.begin_epoch(epoch) == 7
        pixels.append(torch.cat([task.batch(index)[0] for index in range(7)]).flatten(1))
    assert pixels[0].shape == (25, 3072)
    assert not torch.equal(*pixels)
    assert sorted(pixels[0].tolist()) == sorted(pixels[1].tolist()) == sorted(task._pixels.flatten(1).tolist())
    assert task_at(root, limit=3).begin_epoch(0) == 3


def test_the_generator_steps_in_every_fifth_iteration_and_shapes_have_kinds(root: Path, ruler: list[int]) -> None:
    task = task_at(root)
    kinds = [task.kind(index) for index in range(task.begin_epoch(0))]
    assert kinds == ["both", "critic", "critic", "critic", "critic", "both", "critic of 1"]
    shapes = {kind: {task.batch(index)[0].shape for index, each in enumerate(kinds) if each == kind} for kind in kinds}
    assert all(len(each) == 1 for each in shapes.values())


def test_the_kind_of_a_step_decides_which_networks_are_updated(root: Path, ruler: list[int]) -> None:
    task = task_at(root)
    optimizers = optimizers_of(task)
    task.begin_epoch(0)
    for index in range(3):
        before = {name: weights(module) for name, module in task.modules.items()}
        task.step(task.kind(index), task.batch(index), optimizers)
        moved = {name for name, module in task.modules.items() if not torch.equal(before[name], weights(module))}
        assert moved == ({"critic", "generator"} if index == 0 else {"critic"})


# -- the step ------------------------------------------------------------------------------------


def literal_iteration(
    critic: Critic, generator: Generator, optimizers: Mapping[str, Optimizer], real: Tensor, with_generator: bool
) -> float:
    """The iteration in the words of the algorithm: losses apart, gradients added up, noise used twice."""
    optimizers["critic"].zero_grad()
    noise = torch.randn(len(real), NOISE)
    fake = generator(noise).detach()
    loss = -critic(real).mean() + critic(fake).mean()
    share = torch.rand(len(real), 1, 1, 1)
    mixed = autograd.Variable(share * real + (1 - share) * fake, requires_grad=True)
    scores = critic(mixed)
    slope = autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True)[0].reshape(len(real), -1)
    penalty = 10 * ((slope.pow(2).sum(1).sqrt() - 1) ** 2).mean()
    loss.backward()
    penalty.backward()
    optimizers["critic"].step()
    if with_generator:
        optimizers["generator"].zero_grad()
        (-critic(generator(noise)).mean()).backward()
        optimizers["generator"].step()
    return float((loss + penalty).detach())


def test_steps_are_those_of_the_literal_algorithm(root: Path, ruler: list[int]) -> None:
    task = task_at(root)
    ours = optimizers_of(task)
    critic, generator = Critic(), Generator()
    critic.load_state_dict(task.modules["critic"].state_dict())
    generator.load_state_dict(task.modules["generator"].state_dict())
    theirs = {"critic": SGD(critic.parameters(), lr=1e-3), "generator": SGD(generator.parameters(), lr=1e-3)}
    task.begin_epoch(0)
    torch.manual_seed(1)
    losses = walk(task, ours, range(4, 7))
    torch.manual_seed(1)
    expected = [
        literal_iteration(critic, generator, theirs, normalised(doubled(task.batch(index)[0])), index == 5)
        for index in range(4, 7)
    ]
    # the noise of the interpolation comes after that of the generator in both
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, module in (("critic", critic), ("generator", generator)):
        for key, value in module.state_dict().items():
            found = task.modules[name].state_dict()[key]
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6, msg=f"{name} {key}")


def test_a_generator_that_takes_no_step_has_no_gradients_of_an_earlier_one(root: Path, ruler: list[int]) -> None:
    task = task_at(root)
    optimizers = optimizers_of(task)
    task.begin_epoch(0)
    generator = task.modules["generator"]
    walk(task, optimizers, range(1))
    assert all(p.grad is not None for p in generator.parameters())
    walk(task, optimizers, range(1, 2))
    assert all(p.grad is None for p in generator.parameters())


def test_one_seed_repeats_and_a_run_resumes_in_the_middle_of_an_epoch(root: Path, ruler: list[int]) -> None:
    task = task_at(root)
    optimizers = optimizers_of(task)
    task.begin_epoch(1)
    whole = walk(task, optimizers, range(3, 7))

    first = task_at(root)
    first_optimizers = optimizers_of(first)
    first.begin_epoch(1)
    part = walk(first, first_optimizers, range(3, 5))
    chance = torch.get_rng_state()

    second = task_at(root)
    second_optimizers = optimizers_of(second)
    for name, module in second.modules.items():
        module.load_state_dict(first.modules[name].state_dict())
        second_optimizers[name].load_state_dict(first_optimizers[name].state_dict())
    second.load_extra_state(first.extra_state())
    second.begin_epoch(1)
    torch.set_rng_state(chance)
    assert part + walk(second, second_optimizers, range(5, 7)) == whole
    assert torch.equal(weights(second.modules["generator"]), weights(task.modules["generator"]))


def test_bfloat16_trains_float32_weights_to_a_similar_loss(root: Path, ruler: list[int]) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        task = task_at(root, precision=precision)
        task.begin_epoch(0)
        losses[precision] = walk(task, optimizers_of(task), range(2))
        assert {p.dtype for module in task.modules.values() for p in module.parameters()} == {torch.float32}
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.1)


@pytest.mark.gpu
def test_recorded_steps_of_every_kind_have_the_losses_of_plain_ones(root: Path, ruler: list[int]) -> None:
    found = []
    for steps in (PlainSteps, GraphSteps):
        with torch.cuda.stream(torch.cuda.Stream()):
            task = task_at(root, "cuda")
            # a game of two nets magnifies what atomics leave open
            set_up(replace(task._spec, deterministic=True), torch.device("cuda", 0), None)
            taken = steps(task, optimizers_of(task, lr=1e-4))
            losses = [
                float(taken(task.kind(index), task.batch(index)))
                for epoch in range(PLAIN_STEPS + 2)
                for index in range(task.begin_epoch(epoch))
            ]
            found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-3)


# -- the measure ---------------------------------------------------------------------------------


def test_the_distance_is_measured_at_the_end_and_disturbs_nothing(root: Path, ruler: list[int]) -> None:
    task = task_at(root, limit=2)
    assert task.evaluate(final=False) == {}
    assert ruler == []
    before = weights(task.modules["generator"]), torch.get_rng_state()
    found = task.evaluate(final=True)
    assert list(found) == ["frechet_efficientnet_lite0"]
    assert found["frechet_efficientnet_lite0"] > 0
    assert sum(ruler) == 2 * 8  # two batches of four, real and generated
    torch.randn(3)
    assert task.evaluate(final=True) == found
    assert torch.equal(weights(task.modules["generator"]), before[0])
    assert all(module.training for part in task.modules.values() for module in part.modules())
    assert not (root / "frechet").exists()  # a trial's moments are of few images and are not kept


def test_moments_of_real_images_are_computed_once_and_cached_beside_the_data(
    root: Path, ruler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gan, "FAKES", 40)
    first = task_at(root).evaluate(final=True)
    assert sum(ruler) == 25 + 40
    ruler.clear()
    assert task_at(root, batch=8).evaluate(final=True) == first
    assert sum(ruler) == 40
    (kept,) = (root / "frechet").iterdir()
    assert kept.name.startswith("ruler-")
    changed = root / "cifar-10-batches-bin" / "data_batch_2.bin"
    changed.write_bytes(bytes(1) + changed.read_bytes()[1:-1] + b"\x11")
    ruler.clear()
    assert task_at(root).evaluate(final=True) != first
    assert sum(ruler) == 25 + 40


def test_generated_images_are_measured_in_float32_with_running_statistics(root: Path, ruler: list[int]) -> None:
    task = task_at(root, precision="bf16")
    task.begin_epoch(0)
    walk(task, optimizers_of(task), range(1))
    noise = torch.randn(6, NOISE)
    generator = task.modules["generator"].eval()
    with torch.no_grad():
        expected = generator(noise)
    (found,) = task._generated(noise)
    assert torch.equal(found, gan.as_saved(expected))


def test_the_distance_of_a_generator_with_nan_is_nan(root: Path, ruler: list[int]) -> None:
    task = task_at(root, limit=1)
    with torch.no_grad():
        next(task.modules["generator"].parameters())[0] = math.nan
    assert math.isnan(task.evaluate(final=True)["frechet_efficientnet_lite0"])


def test_unusable_options_fail_before_the_first_epoch(root: Path, ruler: list[int]) -> None:
    with pytest.raises(DataError, match=r"for FID is not at .*; get it with: aida data get inception"):
        task_at(root, variant="inception")
    with pytest.raises(ValueError, match=r"torch\.compile does not support the double backward"):
        task_at(root, compiled=True)


# -- the experiment ------------------------------------------------------------------------------


def test_the_declaration_is_that_of_the_paper() -> None:
    experiment = find_experiment("wgan-gp-cifar10")
    assert (experiment.epochs, experiment.batch, experiment.table) == (100, 64, "IV")
    assert -(-50_000 // experiment.batch) == experiment.probe_every == 782
    assert experiment.schedule.factor(99, 78_199, 100) == 1.0
    with torch.device("meta"):
        count = sum(p.numel() for module in (Generator(), Critic()) for p in module.parameters())
    assert experiment.parameters == count
    assert {name: metric.key for name, metric in experiment.metrics.items()} == {
        "default": "frechet_efficientnet_lite0",
        "inception": "fid",
    }
    assert all(metric.better == "lower" for metric in experiment.metrics.values())
    assert experiment.paper_variant == "inception"
    assert len(experiment.paper) == 11
    assert min(experiment.paper, key=lambda method: experiment.paper[method].mean) == "aida-k1"
    assert experiment.tuned("aida")["eps"] == 1e-12


@pytest.mark.slow
@needs(sets.CIFAR10)
def test_a_short_run_on_the_real_images() -> None:
    pytest.importorskip(efficientnet.PACKAGE, reason=f"pip install {efficientnet.PACKAGE}")
    experiment = find_experiment("wgan-gp-cifar10")
    torch.manual_seed(0)
    task = experiment.task(TaskContext(spec(batch=8, limit=2), torch.device("cpu")))
    assert isinstance(task, WganGp)
    optimizers = {
        name: torch.optim.Adam(module.parameters(), lr=2e-4, betas=(0.5, 0.999))
        for name, module in task.modules.items()
    }
    losses = walk(task, optimizers, range(task.begin_epoch(0)))
    assert all(map(math.isfinite, losses))
    assert losses[1] < losses[0]
    distance = task.evaluate(final=True)["frechet_efficientnet_lite0"]
    # noise of an untrained generator against photographs, by 16 of each
    assert 50 < distance < 1000
