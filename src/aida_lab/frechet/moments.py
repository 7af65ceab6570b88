"""Mean and covariance of feature vectors, and the Fréchet distance between Gaussians with these moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aida_lab.data.cache import cached

#: Version of the cache file. Raise it when the file or the preparation of images for a network changes.
_FORMAT = 1


@dataclass(frozen=True)
class Moments:
    """Moments of ``count`` vectors in float64: the mean, and the sum of the outer products of deviations from it."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, vectors: Tensor) -> Moments:
        """The moments of the rows."""
        rows = vectors.double()
        mean = rows.mean(0)
        deviations = rows - mean
        return cls(len(rows), mean, deviations.T @ deviations)

    def joined(self, other: Moments) -> Moments:
        """The moments of both sets together. It subtracts no large sums, so no digits cancel."""
        count = self.count + other.count
        shift = other.mean - self.mean
        mean = self.mean + shift * (other.count / count)
        between = torch.outer(shift, shift) * (self.count * other.count / count)
        return Moments(count, mean, self.scatter + other.scatter + between)

    def on_cpu(self) -> Moments:
        return Moments(self.count, self.mean.cpu(), self.scatter.cpu())

    @property
    def covariance(self) -> Tensor:
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 vectors, got {self.count}; measure more images")
        return self.scatter / (self.count - 1)


def frechet_distance(one: Moments, other: Moments) -> float:
    """Squared distance of the means + tr(C1 + C2 - 2 (C1 C2)^1/2). NaN if a moment is not finite.

    With C = F F', the last trace is the sum of the singular values of F1' F2. This avoids the square root of a
    nonsymmetric product, and works for singular covariances (of few vectors) without an offset on the diagonal.
    """
    parts = (one.mean, other.mean, one.scatter, other.scatter)
    if not all(bool(part.isfinite().all()) for part in parts):
        return float("nan")
    covariances = one.covariance, other.covariance
    apart = (one.mean - other.mean).square().sum().item()
    overlap = torch.linalg.svdvals(_factor(covariances[0]).T @ _factor(covariances[1])).sum().item()
    traces = covariances[0].trace().item() + covariances[1].trace().item()
    return float(apart + traces - 2.0 * overlap)


def _factor(covariance: Tensor) -> Tensor:
    """An F with F F' = covariance; its number of columns is the rank of the covariance."""
    values, vectors = torch.linalg.eigh(covariance)
    # eigenvalues within rounding error of zero are zero: the root of a rounding error would be 1e8 times as large
    noise = values[-1].clamp_min(0.0) * len(values) * torch.finfo(values.dtype).eps
    kept = values > noise
    factor: Tensor = vectors[:, kept] * values[kept].sqrt()
    return factor


def cached_moments(path: Path, origin: str, compute: Callable[[], Moments]) -> Moments:
    """Read the moments from the cache file if it matches ``origin``; otherwise compute and write them.

    ``origin`` describes everything that the moments depend on.
    """
    stored = cached(path, _FORMAT, origin, "the features of the real images", lambda: vars(compute()))
    return Moments(int(stored["count"]), stored["mean"], stored["scatter"])
