"""Means over seeds, and whether two methods differ: nothing here knows of runs or tables.

Two methods on the same seeds are compared by a paired t-test, since a seed fixes the initial weights and
the order of the data on both sides; on different seeds by Welch's, which assumes neither pairs nor equal
variances. The choice depends on which seeds there are and never on the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

#: Below it a difference is called significant.
LEVEL = 0.05

#: Repetitions behind each of the paper's means, where it gives a standard deviation (its Section IV).
PAPER_REPETITIONS = 3


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (divided by n - 1) of a few numbers."""

    n: int
    mean: float
    #: None for a single number.
    std: float | None


@dataclass(frozen=True)
class Comparison:
    """One method against another: how far apart the means are, and how surely."""

    #: Mean of the first minus mean of the second.
    difference: float
    #: "paired", "Welch", or empty where there is no test.
    test: str = ""
    #: Two-sided, uncorrected; None where there is no test.
    p_raw: float | None = None
    #: Corrected by Holm for all comparisons it was made among; as ``p_raw`` where it stood alone.
    p: float | None = None
    #: 95 % confidence interval of the difference, uncorrected.
    interval: tuple[float, float] | None = None
    #: Why there is no test.
    reason: str = ""

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


def summarise(values: Sequence[float]) -> Summary:
    """The mean and spread of at least one number."""
    n = len(values)
    mean = math.fsum(values) / n
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else None
    return Summary(n, mean, std)


def compare(first: Mapping[int, float], second: Mapping[int, float]) -> Comparison:
    """Two methods by their values per seed: paired where the seeds are the same, else Welch's test."""
    one, other = summarise(list(first.values())), summarise(list(second.values()))
    difference = one.mean - other.mean
    if one.n < 2 or other.n < 2:
        return Comparison(difference, reason="n=1, no test")
    if first.keys() == second.keys():
        apart = summarise([first[seed] - second[seed] for seed in first])
        assert apart.std is not None
        error, freedom = apart.std / math.sqrt(apart.n), apart.n - 1.0
        return _tested(difference, error, freedom, "paired", scale=max(abs(one.mean), abs(other.mean)))
    return _welch(one, other)


def against_published(ours: Summary, mean: float, std: float | None) -> Comparison:
    """Our seeds against a published mean: Welch's test where its standard deviation is known."""
    if std is None:
        return Comparison(ours.mean - mean, reason="no std published")
    if ours.n < 2:
        return Comparison(ours.mean - mean, reason="n=1, no test")
    return _welch(ours, Summary(PAPER_REPETITIONS, mean, std))


def holm(comparisons: Mapping[str, Comparison]) -> dict[str, Comparison]:
    """The comparisons with their p-values corrected by Holm's step-down method, as one family.

    With m tests the smallest p-value is multiplied by m, the next by m - 1 and so on, none falling below
    one before it: the chance of even one false claim in the family stays below the level, whatever the
    dependence, and less is lost than by Bonferroni's multiplication by m throughout.
    """
    tested = sorted((each.p_raw, name) for name, each in comparisons.items() if each.p_raw is not None)
    corrected = dict(comparisons)
    highest = 0.0
    for position, (p, name) in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - position) * p))
        corrected[name] = replace(comparisons[name], p=highest)
    return corrected


def _welch(one: Summary, other: Summary) -> Comparison:
    assert one.std is not None
    assert other.std is not None
    a, b = one.std**2 / one.n, other.std**2 / other.n
    # Welch and Satterthwaite's degrees of freedom; without any spread they are not asked for
    freedom = (a + b) ** 2 / (a**2 / (one.n - 1) + b**2 / (other.n - 1)) if a + b > 0 else math.inf
    scale = max(abs(one.mean), abs(other.mean))
    return _tested(one.mean - other.mean, math.sqrt(a + b), freedom, "Welch", scale)


def _tested(difference: float, error: float, freedom: float, test: str, scale: float) -> Comparison:
    from scipy.special import stdtr, stdtrit  # Student's t and its inverse; scipy.stats takes seconds to import

    # Differences that agree to the last digit would give p = 0: with quantised accuracies and few seeds that
    # happens by chance, and says nothing.
    if error <= 1e-12 * scale:
        return Comparison(difference, reason="no spread between seeds, no test")
    p = float(2 * stdtr(freedom, -abs(difference) / error))
    half = float(stdtrit(freedom, 0.975)) * error
    return Comparison(difference, test, p, p, (difference - half, difference + half))
