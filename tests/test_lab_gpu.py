"""The lab on a GPU: recorded steps give the numbers of plain ones, and a broken run its whole self."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aida.baselines.contract import Baseline
from aida.catalog import catalog
from aida_lab.data import images, translation
from aida_lab.experiments import find_experiment
from aida_lab.request import RunRequest
from aida_lab.runs.records import read_curve
from aida_lab.spec import RunSpec
from aida_lab.training.loop import Training, as_asgd
from aida_lab.training.optimizers import build
from aida_lab.training.options import Options
from aida_lab.training.run import Interrupted, own_stream, run
from aida_lab.training.steps import PLAIN_STEPS, GraphSteps
from text_runs import VOCABULARY, pairs

pytestmark = pytest.mark.gpu
GPU = Options(device="cuda")


@pytest.fixture(autouse=True)
def random_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of CIFAR's shape: what is measured here does not depend on what they show."""
    chance = torch.Generator().manual_seed(0)

    def some(count: int) -> images.Images:
        pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=chance)
        return images.Images(pixels, torch.randint(0, 10, (count,), generator=chance))

    splits = images.ImageSplits(some(128 * 60 + 80), some(500), classes=10)
    monkeypatch.setattr(images, "cifar10", lambda root=None: splits)


def spec_of(experiment: str, optimizer: str = "aida", **changes: Any) -> RunSpec:
    request = RunRequest(find_experiment(experiment), (optimizer,), device="cuda", precision="fp32", compiled=False)
    return replace(request.specs()[0], **changes)


def losses(spec: RunSpec, graph: bool, steps: int) -> torch.Tensor:
    with own_stream(torch.device("cuda")):
        training = Training(spec, replace(GPU, graph=graph))
        assert isinstance(training.steps, GraphSteps) is graph
        training.task.begin_epoch(0)
        task = training.task
        found = [training.steps(task.kind(index), task.batch(index)).clone() for index in range(steps)]
        return torch.stack(found).cpu()


@pytest.mark.parametrize("optimizer", catalog())
def test_fifty_recorded_steps_have_the_losses_of_plain_ones(optimizer: str) -> None:
    spec = spec_of("vgg11-cifar10", optimizer)
    torch.testing.assert_close(losses(spec, True, 50), losses(spec, False, 50), rtol=0, atol=1e-5)


def test_fifty_recorded_steps_of_the_optimizer_that_sgd_gives_way_to() -> None:
    spec = as_asgd(spec_of("vgg11-cifar10", "sgd"))
    torch.testing.assert_close(losses(spec, True, 50), losses(spec, False, 50), rtol=0, atol=1e-5)


def test_fifty_recorded_steps_of_a_net_with_batch_norm() -> None:
    spec = spec_of("resnet34-cifar10", deterministic=True)
    torch.testing.assert_close(losses(spec, True, 50), losses(spec, False, 50), rtol=0, atol=1e-5)


def test_recorded_steps_of_packed_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch stands in its rows in its own way, and one graph takes them all."""
    train, valid, words = pairs(2000), pairs(50, seed=1), tuple(f"word {n}" for n in range(VOCABULARY))
    monkeypatch.setattr(translation, "multi30k", lambda root=None: translation.Translation(train, valid, valid, words))
    spec = spec_of("transformer-multi30k", batch=50)
    torch.testing.assert_close(losses(spec, True, 40), losses(spec, False, 40), rtol=0, atol=1e-5)


def test_every_kind_of_step_is_recorded_once_it_came_often_enough(tmp_path: Path) -> None:
    """An epoch's last batch is smaller; it too becomes a graph, and the gradients seen are those of the last step."""
    with own_stream(torch.device("cuda")):
        training = Training(spec_of("vgg11-cifar10"), GPU)
        for _ in range(PLAIN_STEPS + 2):
            training.train_epoch()
        assert isinstance(training.steps, GraphSteps)
        assert set(training.steps._captures) == {"128", "80"}
        seen = [p.grad for p in training.task.modules["model"].parameters()]
        recorded = [grad for _, grad in training.steps._captures["80"].grads]
        assert all(one is other for one, other in zip(seen, recorded, strict=True))


@pytest.mark.parametrize("optimizer", ["aida", "adabelief", "adamw", "sgd"])
def test_a_broken_run_goes_on_to_the_same_bits_with_deterministic_kernels(optimizer: str, tmp_path: Path) -> None:
    spec = spec_of("vgg11-cifar10", optimizer, epochs=4, limit=12, deterministic=True, probe_every=5)
    whole = run(spec, tmp_path / "whole", GPU)
    stopped: list[bool] = []

    def stop_once(event: Any) -> None:
        if event.kind == "step" and event.epoch == 2 and event.share > 0.4 and not stopped:
            stopped.append(True)
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(spec, tmp_path / "broken", GPU, stop_once)
    assert run(spec, tmp_path / "broken", GPU) == whole
    one, other = tmp_path / "whole" / spec.key, tmp_path / "broken" / spec.key
    assert [row["loss"] for row in read_curve(one)] == [row["loss"] for row in read_curve(other)]
    if (one / "stepsizes.jsonl").exists():
        assert (one / "stepsizes.jsonl").read_text() == (other / "stepsizes.jsonl").read_text()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "bf16-true"])
def test_the_same_spec_gives_the_same_curve_again(precision: str, tmp_path: Path) -> None:
    spec = spec_of("vgg11-cifar10", epochs=2, limit=30, precision=precision)
    first, second = (run(spec, tmp_path / name, GPU) for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize(
    "optimizer", [name for name, entry in catalog().items() if issubclass(entry.optimizer, Baseline)]
)
@pytest.mark.filterwarnings("ignore:.*capturable=True.*")
def test_the_compiled_step_of_a_rival_is_its_step(optimizer: str) -> None:
    spec = spec_of("vgg11-cifar10", optimizer)
    device = torch.device("cuda")
    shapes = ((64, 3, 3, 3), (64,), (512, 512), (10, 512), (10,))
    found = []
    for compiled in (False, True):
        chance = torch.Generator(device).manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, device=device, generator=chance)) for shape in shapes]
        made = build(replace(spec, compiled=compiled), torch.nn.ParameterList(params), device)
        for _ in range(7):  # RAdam rectifies from the sixth step on
            for param in params:
                param.grad = torch.randn(param.shape, device=device, generator=chance)
            made.step()
        found.append([param.detach() for param in params])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
