"""Means over seeds, and tests of whether two methods differ.

Methods are compared with one control, unpaired: seeds do not correlate across methods (docs/comparing.md has the
numbers), so pairing by seed would only lose degrees of freedom. The variance is pooled over all methods, because a
few seeds of one method say little about it, and Dunnett's procedure corrects for the number of methods.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: A difference is significant if its p-value is below this level.
LEVEL = 0.05

#: Repetitions behind each of the paper's means with a standard deviation (its Section IV).
PAPER_REPETITIONS = 3

#: SciPy integrates Dunnett's distribution by randomised quasi-Monte-Carlo. A fixed seed gives the same report twice.
_SEED = 0


@dataclass(frozen=True)
class MeanStd:
    """Mean and sample standard deviation (divided by n - 1) of a few numbers."""

    n: int
    mean: float
    std: float | None  #: None for a single number


@dataclass(frozen=True)
class Comparison:
    """One method against another: the difference of the means, its confidence interval and its p-value."""

    difference: float  #: mean of the first minus mean of the second
    test: str = ""  #: "Dunnett", "Student" or "Welch"; empty if there is no test
    #: Two-sided. Dunnett's is adjusted for all methods compared with the same control. None if there is no test.
    p: float | None = None
    #: 95 % confidence interval of the difference. Dunnett's intervals hold simultaneously for the whole family.
    interval: tuple[float, float] | None = None
    freedom: float | None = None  #: degrees of freedom of the variance
    reason: str = ""  #: why there is no test

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


def mean_std(values: Sequence[float]) -> MeanStd:
    """Mean and standard deviation of at least one number."""
    n = len(values)
    mean = math.fsum(values) / n
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else None
    return MeanStd(n, mean, std)


def against_control(control: str, samples: Mapping[str, Sequence[float]]) -> dict[str, Comparison]:
    """Compare every method in ``samples`` with ``control`` by Dunnett's test, two-sided.

    With two methods Dunnett's test is Student's, which is computed without random numbers. A method with one number
    is not tested and takes no part in the correction: nothing shows that its spread is like that of the others.
    """
    found = {method: mean_std(values) for method, values in samples.items()}
    tested = [method for method, each in found.items() if each.n > 1 and method != control]
    squares = {method: each.std**2 * (each.n - 1) for method, each in found.items() if each.std is not None}
    freedom = sum(found[method].n - 1 for method in squares)
    pooled = math.sqrt(math.fsum(squares.values()) / freedom) if freedom else 0.0
    why = ""
    if found[control].n == 1:
        why = "reference n=1, no test"
    elif pooled <= 1e-12 * max(abs(each.mean) for each in found.values()):
        why = "no spread between seeds, no test"
    differences = {method: each.mean - found[control].mean for method, each in found.items() if method != control}
    comparisons = {
        method: Comparison(difference, reason="n=1, no test" if found[method].n == 1 else why)
        for method, difference in differences.items()
    }
    if why or not tested:
        return comparisons
    if len(tested) == 1:
        (method,) = tested
        error = pooled * math.sqrt(1 / found[method].n + 1 / found[control].n)
        return {**comparisons, method: _student(differences[method], error, freedom, "Student")}
    p_values, intervals = _dunnett([samples[method] for method in tested], samples[control])
    for method, p, interval in zip(tested, p_values, intervals, strict=True):
        comparisons[method] = Comparison(differences[method], "Dunnett", p, interval, freedom)
    return comparisons


def equivalence(found: Comparison, margin: float) -> float | None:
    """The p-value of two one-sided tests that the difference lies within ± margin. None if there is no Student's test.

    Both one-sided tests must reject, so the larger p-value counts.
    """
    if found.interval is None or found.freedom is None or found.test != "Student":
        return None
    from scipy.special import stdtr, stdtrit

    low, high = found.interval
    error = (high - low) / 2 / stdtrit(found.freedom, 1 - LEVEL / 2)
    return float(stdtr(found.freedom, (abs(found.difference) - margin) / error))


def against_published(ours: MeanStd, mean: float, std: float | None) -> Comparison:
    """Our seeds against a published mean: Welch's test if its standard deviation is known."""
    difference = ours.mean - mean
    if std is None:
        return Comparison(difference, reason="no std published")
    if ours.std is None:
        return Comparison(difference, reason="n=1, no test")
    a, b = ours.std**2 / ours.n, std**2 / PAPER_REPETITIONS
    if math.sqrt(a + b) <= 1e-12 * max(abs(ours.mean), abs(mean)):
        return Comparison(difference, reason="no spread between seeds, no test")
    # the degrees of freedom after Welch and Satterthwaite; from shares, because the square of a variance may overflow
    share = a / (a + b)
    freedom = 1 / (share**2 / (ours.n - 1) + (1 - share) ** 2 / (PAPER_REPETITIONS - 1))
    return _student(difference, math.sqrt(a + b), freedom, "Welch")


def _student(difference: float, error: float, freedom: float, test: str) -> Comparison:
    from scipy.special import stdtr, stdtrit  # Student's t and its inverse

    p = float(2 * stdtr(freedom, -abs(difference) / error))
    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * error
    return Comparison(difference, test, p, (difference - half, difference + half), freedom)


def _dunnett(
    samples: Sequence[Sequence[float]], control: Sequence[float]
) -> tuple[list[float], list[tuple[float, float]]]:
    """Adjusted p-values and simultaneous 95 % intervals of at least two samples against the control."""
    import numpy as np
    from scipy.stats import dunnett  # here, as it takes a second to import

    # SciPy 1.15 renamed the argument
    name = "rng" if "rng" in inspect.signature(dunnett).parameters else "random_state"
    seed: dict[str, Any] = {name: np.random.default_rng(_SEED)}
    with warnings.catch_warnings():
        # SciPy warns of a sample without spread, which is no error: it adds nothing to the variance. With two samples
        # of odd sizes it also warns, rarely, that the intervals miss their level (by 0.001 in 1,500 random designs).
        warnings.simplefilter("ignore")
        found = dunnett(*samples, control=control, **seed)
        interval = found.confidence_interval(1 - LEVEL)
    # the integral is exact to about 1e-4: a tiny p-value may come out as a negative number
    p_values = [min(1.0, max(0.0, float(p))) for p in found.pvalue]
    return p_values, [(float(low), float(high)) for low, high in zip(interval.low, interval.high, strict=True)]
