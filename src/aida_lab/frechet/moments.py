"""Mean and covariance of feature vectors, and the Fréchet distance between the Gaussians that have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Of ``count`` vectors: their mean, and the sum of the outer products of their deviations from it, in float64."""

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
        """The moments of both sets together; no difference of large sums is taken, so nothing cancels."""
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
            raise ValueError(f"a covariance needs at least 2 vectors, not {self.count}; measure more images")
        return self.scatter / (self.count - 1)


def frechet_distance(one: Moments, other: Moments) -> float:
    """Squared distance of the means + tr(C1 + C2 - 2 (C1 C2)^1/2); NaN where a moment is not finite.

    With C = F F' the last trace is the sum of the singular values of F1' F2: no square root of a product that is
    not symmetric, and none of a small number whose leading digits have cancelled. Covariances of few vectors,
    which are singular, need no offset on the diagonal.
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
    """An F with F F' = covariance, as many columns wide as the covariance has rank."""
    values, vectors = torch.linalg.eigh(covariance)
    # what float64 cannot tell from zero is zero: the root of a rounding error would be 1e8 times as large
    noise = values[-1].clamp_min(0.0) * len(values) * torch.finfo(values.dtype).eps
    kept = values > noise
    factor: Tensor = vectors[:, kept] * values[kept].sqrt()
    return factor
