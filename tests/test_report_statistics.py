"""The numbers of a report against computations that share no code with it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aida.report.statistics import Comparison, Summary, against_published, compare, holm, summarise


def tail(t: float, freedom: float) -> float:
    """Two-sided p of Student's t by integrating its density, the far tail substituted into a finite interval."""
    peak = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    u = (np.arange(400_000) + 0.5) / 400_000  # midpoints
    x = abs(t) + (1 - u) / u
    return float(2 * np.mean(peak * (1 + x**2 / freedom) ** (-(freedom + 1) / 2) / u**2))


def paired(a: list[float], b: list[float]) -> float:
    d = np.subtract(a, b)
    return tail(float(d.mean() / (d.std(ddof=1) / math.sqrt(len(d)))), len(d) - 1)


def welch(mean: tuple[float, float], std: tuple[float, float], n: tuple[int, int]) -> float:
    v = [s**2 / k for s, k in zip(std, n, strict=True)]
    freedom = sum(v) ** 2 / sum(each**2 / (k - 1) for each, k in zip(v, n, strict=True))
    return tail((mean[0] - mean[1]) / math.sqrt(sum(v)), freedom)


A, B = [91.52, 91.70, 91.81], [91.20, 91.31, 91.62]


def test_the_independent_tail_is_right_where_it_is_known_in_closed_form():
    for t in (0.1, 1.0, 4.3, 30.0):
        assert tail(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t**2), rel=1e-6)
        assert tail(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-6)


@pytest.mark.parametrize("values", [A, [0.001, 0.002], [1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3]])
def test_mean_and_sample_deviation(values):
    found = summarise(values)
    assert (found.n, found.mean) == (len(values), pytest.approx(np.mean(values), rel=1e-14))
    assert found.std == pytest.approx(np.std(values, ddof=1), rel=1e-9)


def test_one_number_has_no_deviation():
    assert summarise([3.0]) == Summary(1, 3.0, None)


def test_same_seeds_are_compared_in_pairs():
    found = compare({0: A[0], 1: A[1], 2: A[2]}, {2: B[2], 0: B[0], 1: B[1]})
    assert found.test == "paired"
    assert found.difference == pytest.approx(np.mean(A) - np.mean(B))
    assert found.p_raw == pytest.approx(paired(A, B), rel=1e-6)
    # with two degrees of freedom the 97.5 % point is known: 4.302653
    half = 4.302652729911275 * np.subtract(A, B).std(ddof=1) / math.sqrt(3)
    assert found.interval == (pytest.approx(found.difference - half), pytest.approx(found.difference + half))


@pytest.mark.parametrize("seeds", [(3, 4, 5), (1, 2, 3)])
def test_other_seeds_are_compared_by_welch(seeds):
    found = compare(dict(enumerate(A)), dict(zip(seeds, B, strict=True)))
    assert found.test == "Welch"
    std = (float(np.std(A, ddof=1)), float(np.std(B, ddof=1)))
    assert found.p_raw == pytest.approx(welch((np.mean(A), np.mean(B)), std, (3, 3)), rel=1e-6)


def test_more_seeds_on_one_side_are_all_used():
    more = [*A, 91.6, 91.9]
    found = compare(dict(enumerate(more)), dict(enumerate(B)))
    std = (float(np.std(more, ddof=1)), float(np.std(B, ddof=1)))
    assert found.test == "Welch"
    assert found.p_raw == pytest.approx(welch((np.mean(more), np.mean(B)), std, (5, 3)), rel=1e-6)


def test_a_published_mean_is_three_repetitions():
    found = against_published(summarise(A), 91.20, 0.21)
    assert found.p == pytest.approx(welch((np.mean(A), 91.20), (float(np.std(A, ddof=1)), 0.21), (3, 3)), rel=1e-6)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (compare({0: 1.0}, {0: 2.0, 1: 3.0}), "n=1, no test"),
        (compare({0: 1.0, 1: 2.0}, {0: 2.0}), "n=1, no test"),
        (compare({0: 97.5, 1: 97.2}, {0: 97.0, 1: 96.7}), "no spread between seeds, no test"),
        (compare({0: 97.5, 1: 97.5}, {2: 97.0, 3: 97.0}), "no spread between seeds, no test"),
        (against_published(summarise([1.0]), 2.0, 0.1), "n=1, no test"),
        (against_published(summarise([1.0, 2.0]), 2.0, None), "no std published"),
    ],
)
def test_without_a_test_there_is_a_reason_and_no_claim(found, reason):
    assert (found.p, found.p_raw, found.significant, found.reason) == (None, None, False, reason)
    assert found.difference < 1


def test_holm_by_hand():
    raw = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    family = {name: Comparison(0.0, "paired", p, p) for name, p in raw.items()}
    corrected = {name: each.p for name, each in holm(family).items()}
    # 4 x .005, 3 x .01, 2 x .03, and 1 x .04 lifted to the one before it
    assert corrected == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})


def test_holm_leaves_out_what_was_not_tested():
    family = {"a": Comparison(0.0, "paired", 0.03, 0.03), "b": Comparison(1.0, reason="n=1, no test")}
    corrected = holm(family)
    assert corrected["a"].p == 0.03
    assert corrected["b"] == family["b"]
    assert holm({"a": Comparison(0.0, "paired", 0.7, 0.7), "b": Comparison(0.0, "paired", 0.6, 0.6)})["a"].p == 1.0
