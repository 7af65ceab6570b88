"""Convex problems with a known minimiser, which a regret needs.

Each is a function of one flat vector. ``layers`` are the slices of its layers: projections act per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LogisticRegression:
    """Mean logistic loss over a data set, plus ``l2 / 2 * |theta|^2``.

    Without the L2 term, separable data have no minimiser (breast-cancer and digits are separable or nearly so) and
    the regret is undefined. The term includes the biases, so the function is strongly convex in every coordinate.
    """

    name: str
    features: Array  #: examples x features, each feature with mean 0 and variance 1
    targets: Array  #: examples x outputs: one column of 0 and 1 for two classes, else one-hot
    l2: float

    @property
    def outputs(self) -> int:
        return int(self.targets.shape[1])

    @property
    def layers(self) -> tuple[slice, ...]:
        weights = self.features.shape[1] * self.outputs
        return slice(0, weights), slice(weights, weights + self.outputs)

    @property
    def start(self) -> Array:
        return np.zeros(self.layers[-1].stop)

    @cached_property
    def minimiser(self) -> Array:
        from scipy.optimize import minimize  # type: ignore[import-untyped]

        # tolerances below float64 precision: it runs until no step improves f any more
        options = {"maxiter": 20_000, "maxfun": 40_000, "maxcor": 50, "ftol": 0.0, "gtol": 1e-13}
        found = minimize(self._value_and_gradient, self.start, jac=True, method="L-BFGS-B", options=options)
        return np.asarray(found.x, dtype=np.float64)

    def value(self, theta: Array) -> float:
        return self._value_and_gradient(theta)[0]

    def gradient(self, theta: Array, rows: NDArray[np.intp] | None = None) -> Array:
        """The gradient over the examples ``rows``, or over all."""
        return self._value_and_gradient(theta, rows)[1]

    def _value_and_gradient(self, theta: Array, rows: NDArray[np.intp] | None = None) -> tuple[float, Array]:
        features = self.features if rows is None else self.features[rows]
        targets = self.targets if rows is None else self.targets[rows]
        weights = theta[self.layers[0]].reshape(-1, self.outputs)
        scores = features @ weights + theta[self.layers[1]]
        # log-partition over the classes, without overflow or cancellation
        if self.outputs == 1:
            partition = np.logaddexp(0, scores[:, 0])
            probabilities = np.exp(scores - np.logaddexp(0, scores))
        else:
            top = scores.max(axis=1)
            probabilities = np.exp(scores - top[:, None])
            total = probabilities.sum(axis=1)
            partition = top + np.log(total)
            probabilities /= total[:, None]
        loss = float(np.mean(partition - (targets * scores).sum(axis=1)))
        error = (probabilities - targets) / len(features)
        gradient = np.concatenate([(features.T @ error).ravel(), error.sum(axis=0)]) + self.l2 * theta
        return loss + self.l2 / 2 * float(theta @ theta), gradient


@dataclass(frozen=True)
class SmoothAbsolute:
    """The sum of ``sqrt(1 + theta[i]^2) - 1``, as one layer: convex, slopes at most 1, minimiser 0."""

    origin: tuple[float, ...]
    name: str = "smooth absolute value"

    @property
    def layers(self) -> tuple[slice, ...]:
        return (slice(0, len(self.origin)),)

    @property
    def start(self) -> Array:
        return np.array(self.origin)

    @property
    def minimiser(self) -> Array:
        return np.zeros(len(self.origin))

    def value(self, theta: Array) -> float:
        return float((np.hypot(1, theta) - 1).sum())

    def gradient(self, theta: Array, rows: NDArray[np.intp] | None = None) -> Array:
        return theta / np.hypot(1, theta)


Problem = LogisticRegression | SmoothAbsolute


def breast_cancer(l2: float = 1e-3) -> LogisticRegression:
    """scikit-learn's breast-cancer set: 569 examples, 30 features, two classes, 31 parameters."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    return LogisticRegression("breast-cancer", _standardised(features), labels[:, None].astype(np.float64), l2)


def digits(l2: float = 1e-3) -> LogisticRegression:
    """scikit-learn's digits: 1797 examples, 64 pixels, ten classes, 650 parameters."""
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    return LogisticRegression("digits", _standardised(features), np.eye(10)[labels], l2)


def _standardised(features: Any) -> Array:
    scale = features.std(axis=0)
    scale[scale == 0] = 1  # three corner pixels of the digits are always blank
    return np.asarray((features - features.mean(axis=0)) / scale, dtype=np.float64)
