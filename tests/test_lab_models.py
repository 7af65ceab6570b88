"""The lab's networks: their exact size, that each trains with Aida, and the image networks' own laws."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import aida
from aida_lab import models
from aida_lab.models.digits import DigitsNet
from aida_lab.models.lstm import AwdLstm
from aida_lab.models.resnet import ResNet, resnet18_imagenet, resnet34_cifar
from aida_lab.models.stem import Stem
from aida_lab.models.transformer import Transformer
from aida_lab.models.vgg import VGG11
from aida_lab.models.wgan import NOISE, Critic, Generator
from lab_cases import language_loss, one_thread_and_a_seed, tiny_transformer, translation_loss, words

same_start = pytest.fixture(autouse=True)(one_thread_and_a_seed)


def images(batch: int, size: int, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size)


def labelled(inputs: Tensor, classes: int) -> Callable[[nn.Module], Tensor]:
    labels = torch.arange(inputs.size(0)) % classes
    return lambda model: functional.cross_entropy(model(inputs), labels)


@dataclass(frozen=True)
class Case:
    """A network at full size, its count of parameters, and a loss on a batch small enough for one core."""

    build: Callable[[], nn.Module]
    parameters: int
    make_loss: Callable[[], Callable[[nn.Module], Tensor]]
    lr: float = 1e-3


def text_loss() -> Callable[[nn.Module], Tensor]:
    text = words(9, 2, vocabulary=10_000)
    return lambda model: language_loss(model, text)  # type: ignore[arg-type]


def sentence_loss() -> Callable[[nn.Module], Tensor]:
    source, target = words(2, 6, vocabulary=9521), words(2, 7, vocabulary=9521)
    return lambda model: translation_loss(model, source, target)  # type: ignore[arg-type]


def generator_loss() -> Callable[[nn.Module], Tensor]:
    noise, wanted = torch.randn(4, NOISE), images(4, 64).tanh()
    return lambda model: functional.mse_loss(model(noise), wanted)


def critic_loss() -> Callable[[nn.Module], Tensor]:
    real, fake = images(4, 64), images(4, 64).tanh()
    return lambda model: model(fake).mean() - model(real).mean()


CASES = {
    "vgg11-10": Case(VGG11, 9_750_922, lambda: labelled(images(8, 32), 10)),
    "vgg11-100": Case(lambda: VGG11(100), 9_797_092, lambda: labelled(images(8, 32), 100)),
    "resnet34-10": Case(resnet34_cifar, 21_282_122, lambda: labelled(images(2, 32), 10)),
    "resnet34-100": Case(lambda: resnet34_cifar(100), 21_328_292, lambda: labelled(images(2, 32), 100)),
    "resnet18": Case(resnet18_imagenet, 11_689_512, lambda: labelled(images(4, 64), 1000)),
    "lstm1": Case(lambda: AwdLstm(1), 5_293_200, text_loss),
    "lstm2": Case(lambda: AwdLstm(2), 13_632_400, text_loss),
    "lstm3": Case(lambda: AwdLstm(3), 24_221_600, text_loss),
    "lstm3-faithful": Case(lambda: AwdLstm(3, weight_drop="faithful"), 24_221_600, text_loss),
    "transformer": Case(Transformer, 48_978_432, sentence_loss, lr=1e-4),
    "generator": Case(Generator, 3_576_704, generator_loss),
    "critic": Case(Critic, 2_765_569, critic_loss),
    "digits": Case(DigitsNet, 38_282, lambda: labelled(images(16, 8, channels=1), 10)),
}


@pytest.mark.parametrize("name", CASES)
def test_parameter_counts_are_exact(name: str) -> None:
    with torch.device("meta"):
        model = CASES[name].build()
    assert sum(p.numel() for p in model.parameters()) == CASES[name].parameters


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("-100")])
def test_trains_with_aida_and_the_loss_falls(name: str) -> None:
    case = CASES[name]
    model, loss_of = case.build(), case.make_loss()
    optimizer = aida.Aida(model.parameters(), lr=case.lr)
    losses = []
    for step in range(4):
        torch.manual_seed(1)  # the same dropout masks every time: the loss is then one fixed function
        loss = loss_of(model)
        losses.append(loss.item())
        if step < 3:
            optimizer.zero_grad()
            loss.backward()
            for key, parameter in model.named_parameters():
                assert (parameter.grad is not None) == parameter.requires_grad, key
                assert parameter.grad is None or parameter.grad.isfinite().all(), key
            optimizer.step()
    assert losses[-1] < losses[0], losses


@pytest.mark.parametrize("build", [VGG11, DigitsNet, lambda: AwdLstm(2, 100), tiny_transformer, Critic])
def test_one_seed_gives_one_model_and_two_seeds_two(build: Callable[[], nn.Module]) -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in build().parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_models_import_nothing_but_torch_and_each_other() -> None:
    folder = Path(models.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names if not name.startswith("aida_lab.models.")}
            assert roots <= {"__future__", "math", "typing", "torch"}, f"{path.name} imports {roots}"


# -- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "inputs", "shape"),
    [
        (VGG11, (2, 3, 32, 32), (2, 10)),
        (lambda: VGG11(100), (1, 3, 32, 32), (1, 100)),
        (resnet34_cifar, (1, 3, 32, 32), (1, 10)),
        (resnet18_imagenet, (1, 3, 224, 224), (1, 1000)),
        (DigitsNet, (2, 1, 8, 8), (2, 10)),
        (Generator, (2, NOISE), (2, 3, 64, 64)),
        (Generator, (2, NOISE, 1, 1), (2, 3, 64, 64)),
        (Critic, (2, 3, 64, 64), (2,)),
    ],
)
def test_output_shapes(model: Callable[[], nn.Module], inputs: tuple[int, ...], shape: tuple[int, ...]) -> None:
    assert model().eval()(torch.randn(inputs)).shape == shape


@pytest.mark.parametrize("build", [VGG11, resnet34_cifar, Critic])
def test_channels_last_gives_the_same_output(build: Callable[[], nn.Module]) -> None:
    model, batch = build().eval(), images(2, 64 if build is Critic else 32)
    plain = model(batch)
    last = model.to(memory_format=torch.channels_last)(batch.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_stem_over_patches_is_a_convolution(bias: bool, layout: torch.memory_format) -> None:
    stem = Stem(3, 16, bias=bias).double().to(memory_format=layout)  # type: ignore[call-overload]
    batch = images(2, 9).double()[..., :7].contiguous(memory_format=layout)
    one, other = stem.over_patches(batch), nn.functional.conv2d(batch, stem.weight, stem.bias, padding=1)
    torch.testing.assert_close(one, other)
    assert one.is_contiguous(memory_format=torch.channels_last)
    parameters = list(stem.parameters())
    found = [torch.autograd.grad(out.square().sum(), parameters) for out in (one, other)]
    torch.testing.assert_close(*found)
    assert stem(batch).shape == (2, 16, 9, 7)


def test_vgg_has_the_eleven_layers_of_the_figures() -> None:
    shapes = [p.shape for p in VGG11().parameters()]
    assert len(shapes) == 22
    assert sum(len(shape) > 1 for shape in shapes) == 11


@pytest.mark.parametrize(("build", "size", "side"), [(resnet34_cifar, 32, 4), (resnet18_imagenet, 224, 7)])
def test_resnets_halve_the_resolution_at_the_right_places(build: Callable[[], ResNet], size: int, side: int) -> None:
    model = build().eval()
    maps = model.stem(images(1, size))
    shapes = []
    for stage in model.stages:
        maps = stage(maps)
        shapes.append(tuple(maps.shape[1:]))
    assert shapes == [(64 * 2**i, side * 2 ** (3 - i), side * 2 ** (3 - i)) for i in range(4)]


def test_vgg_pools_before_relu_with_the_values_and_gradients_of_the_other_order() -> None:
    def paper_order(layers: list[nn.Module]) -> list[nn.Module]:
        pools = [at for at, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
        for at in pools:
            layers[at], layers[at + 1] = layers[at + 1], layers[at]
        return layers

    model, batch = VGG11().eval(), images(8, 32)
    kinds = [type(layer).__name__ for layer in paper_order(list(model.features))]
    assert (
        "".join({"Stem": "C", "Conv2d": "C", "ReLU": "R", "MaxPool2d": "M"}[kind] for kind in kinds)
        == "CRMCRM" + 3 * "CRCRM"
    )
    other = nn.Sequential(*paper_order(list(model.features)), nn.Flatten(), model.classifier)
    ours, theirs = model(batch), other(batch)
    assert torch.equal(ours, theirs)
    for one, two in zip(
        *(torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (ours, theirs)), strict=True
    ):
        assert torch.equal(one, two)


def test_vgg_dropout_is_off_in_eval_and_on_in_training() -> None:
    model, batch = VGG11(), images(2, 32)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_vgg_convolutions_are_initialised_as_specified() -> None:
    for module in VGG11().modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * module.out_channels)), rel=0.06)
            assert module.bias is not None
            assert not module.bias.any()


def test_resnets_differ_in_initialisation() -> None:
    def last_conv(model: nn.Module) -> nn.Conv2d:
        return [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)][-1]

    width = 9 * 512
    assert last_conv(resnet34_cifar()).weight.std().item() == pytest.approx(math.sqrt(1 / (3 * width)), rel=0.02)
    assert last_conv(resnet18_imagenet()).weight.std().item() == pytest.approx(math.sqrt(2 / width), rel=0.02)


@pytest.mark.parametrize("build", [Generator, Critic])
def test_wgan_is_initialised_as_specified(build: Callable[[], nn.Module]) -> None:
    norms = []
    for module in build().modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert module.bias is None
        elif isinstance(module, nn.BatchNorm2d):
            norms.append(module.weight.detach())
            assert not module.bias.any()
    assert torch.cat(norms).mean().item() == pytest.approx(1.0, abs=0.005)
    assert torch.cat(norms).std().item() == pytest.approx(0.02, rel=0.2)


def test_generator_outputs_lie_between_minus_one_and_one() -> None:
    assert Generator()(100 * torch.randn(2, NOISE)).abs().max() <= 1


def test_critic_has_the_second_derivative_a_gradient_penalty_needs() -> None:
    critic, batch = Critic(), images(3, 64).requires_grad_()
    (slope,) = torch.autograd.grad(critic(batch).sum(), batch, create_graph=True)
    (slope.flatten(1).norm(dim=1) - 1).pow(2).mean().backward()
    gradients = {key: p.grad for key, p in critic.named_parameters() if p.dim() > 1}
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values()), gradients.keys()
