"""The numbers of a report against computations that share no code with it."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
from scipy import stats

from aida_lab.report.statistics import MeanStd, against_control, against_published, mean_std
from dunnett_by_hand import dunnett_by_hand, dunnett_tail


def tail(t: float, freedom: float) -> float:
    """Two-sided p of Student's t by integrating its density, the far tail substituted into a finite interval."""
    peak = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    u = (np.arange(400_000) + 0.5) / 400_000  # midpoints
    x = abs(t) + (1 - u) / u
    return float(2 * np.mean(peak * (1 + x**2 / freedom) ** (-(freedom + 1) / 2) / u**2))


def welch(mean: tuple[float, float], std: tuple[float, float], n: tuple[int, int]) -> float:
    v = [s**2 / k for s, k in zip(std, n, strict=True)]
    freedom = sum(v) ** 2 / sum(each**2 / (k - 1) for each, k in zip(v, n, strict=True))
    return tail((mean[0] - mean[1]) / math.sqrt(sum(v)), freedom)


A, B, C = [91.52, 91.70, 91.81], [91.20, 91.31, 91.62], [91.40, 91.15, 91.05]


def test_the_independent_tails_are_right_where_they_are_known():
    for t in (0.1, 1.0, 4.3, 30.0):
        assert tail(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t**2), rel=1e-6)
        assert tail(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-6)
    assert dunnett_tail(2.0, 3, [3], 4) == pytest.approx(tail(2.0, 4), rel=1e-6)
    # Dunnett's table of 1964, two-sided, 5 %, equal sizes; it has two digits
    for freedom, row in ((20, {1: 2.09, 2: 2.38, 3: 2.54, 9: 2.95}), (10, {2: 2.57, 3: 2.76, 5: 2.99})):
        for others, value in row.items():
            below, above = (dunnett_tail(value + step, 3, [3] * others, freedom) for step in (0.0051, -0.0051))
            assert below < 0.05 < above


@pytest.mark.parametrize("values", [A, [0.001, 0.002], [1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3]])
def test_mean_and_sample_deviation(values):
    found = mean_std(values)
    assert (found.n, found.mean) == (len(values), pytest.approx(np.mean(values), rel=1e-14))
    assert found.std == pytest.approx(np.std(values, ddof=1), rel=1e-9)


def test_one_number_has_no_deviation():
    assert mean_std([3.0]) == MeanStd(1, 3.0, None)


@pytest.mark.parametrize(
    "samples",
    [
        {"k2": A, "adam": B, "sgd": C},
        {"k2": A, "adam": [*B, 91.4, 91.3], "sgd": C[:2], "yogi": [90.1, 90.3, 90.2]},  # other sizes
        {"k2": A[:2], "adam": B[:2], "sgd": C[:2]},
        {"adam": [0.52, 0.50], "k2": [0.51, 0.49, 0.53], "sgd": [0.47, 0.48]},  # the control need not come first
    ],
)
def test_every_method_is_compared_with_the_control_by_dunnetts_test(samples):
    found = against_control("k2", samples)
    others = [method for method in samples if method != "k2"]
    expected = dunnett_by_hand(samples["k2"], [samples[method] for method in others])
    assert list(found) == others
    freedom = sum(len(values) - 1 for values in samples.values())
    pooled = math.sqrt(sum(np.var(v, ddof=1) * (len(v) - 1) for v in samples.values()) / freedom)
    for method, p in zip(others, expected, strict=True):
        each = found[method]
        assert (each.test, each.freedom) == ("Dunnett", freedom)
        assert each.difference == pytest.approx(np.mean(samples[method]) - np.mean(samples["k2"]))
        assert each.p == pytest.approx(p, abs=5e-4)
        # at the ends of the interval Dunnett's p is 5 %
        low, high = each.interval
        error = pooled * math.sqrt(1 / len(samples[method]) + 1 / len(samples["k2"]))
        assert (low + high) / 2 == pytest.approx(each.difference)
        sizes = [len(samples[other]) for other in others]
        assert dunnett_tail((high - low) / 2 / error, len(samples["k2"]), sizes, freedom) == pytest.approx(
            0.05, abs=1e-3
        )


def test_two_methods_are_compared_by_students_test():
    found = against_control("k2", {"k2": A, "adam": B})["adam"]
    error = math.sqrt((np.var(A, ddof=1) + np.var(B, ddof=1)) / 2 * (2 / 3))
    assert (found.test, found.freedom) == ("Student", 4)
    assert found.p == pytest.approx(tail(found.difference / error, 4), rel=1e-6)
    half = 2.7764451051977987 * error  # the 97.5 % point of Student's t with four degrees of freedom
    assert found.interval == (pytest.approx(found.difference - half), pytest.approx(found.difference + half))


def test_the_order_of_the_seeds_means_nothing():
    turned = {"k2": A, "adam": B[::-1], "sgd": [C[1], C[2], C[0]]}
    one, other = against_control("k2", {"k2": A, "adam": B, "sgd": C}), against_control("k2", turned)
    for method in ("adam", "sgd"):
        assert one[method].p == pytest.approx(other[method].p, abs=1e-9)


def test_equal_differences_of_every_seed_are_tested_as_any_others():
    """AdaBelief in the demo: 0.34 below Aida on each seed, by chance."""
    aida = [97.98, 97.64, 98.32]
    below = [value - 0.34 for value in aida]
    found = against_control("aida", {"aida": aida, "adabelief": below, "adam": [97.64, 97.98, 97.31]})["adabelief"]
    assert found.reason == ""
    assert found.p == pytest.approx(dunnett_by_hand(aida, [below, [97.64, 97.98, 97.31]])[0], abs=5e-4)


def test_the_same_numbers_give_the_same_bits():
    samples = {"k2": A, "adam": B, "sgd": C, "yogi": [90.0, 90.3]}
    np.random.seed(1)
    first = against_control("k2", samples)
    np.random.seed(2)
    assert against_control("k2", samples) == first


@pytest.mark.parametrize("name", ["rng", "random_state"])
def test_scipys_generator_goes_by_either_name(monkeypatch, name):
    """Version 1.15 of SciPy renamed the argument; 1.11, the oldest one that is allowed, has the old name."""
    real = stats.dunnett
    own = "rng" if "rng" in inspect.signature(real).parameters else "random_state"
    asked = []

    def renamed(*samples, control, **changes):
        asked.extend(changes)
        return real(*samples, control=control, **{own: changes[name]})

    kinds = {"samples": inspect.Parameter.VAR_POSITIONAL, "control": inspect.Parameter.KEYWORD_ONLY}
    kinds[name] = inspect.Parameter.KEYWORD_ONLY
    renamed.__signature__ = inspect.Signature([inspect.Parameter(*each) for each in kinds.items()])
    expected = against_control("k2", {"k2": A, "adam": B, "sgd": C})
    monkeypatch.setattr(stats, "dunnett", renamed)
    assert against_control("k2", {"k2": A, "adam": B, "sgd": C}) == expected
    assert asked == [name]


def test_a_method_with_one_run_is_not_tested_and_changes_no_other_test():
    samples = {"k2": A, "adam": B, "sgd": C}
    found = against_control("k2", {**samples, "yogi": [80.0]})
    assert found.pop("yogi").reason == "n=1, no test"
    assert found == against_control("k2", samples)


@pytest.mark.filterwarnings("error")
def test_one_method_without_spread_is_tested_by_the_others_spread():
    found = against_control("k2", {"k2": A, "adam": [91.2, 91.2, 91.2], "sgd": C})
    assert found["adam"].p == pytest.approx(dunnett_by_hand(A, [[91.2] * 3, C])[0], abs=5e-4)


@pytest.mark.filterwarnings("error")
def test_scipys_noise_is_not_the_users_business():
    """Samples of these sizes are among those whose interval SciPy finds to 2 % of its level only, and says so."""
    random = np.random.default_rng(0)
    found = against_control("k2", {"k2": list(random.normal(size=5)), "adam": list(random.normal(size=4)),
                                   "sgd": list(random.normal(size=6))})  # fmt: skip
    assert found["adam"].interval is not None


def test_far_apart_means_have_a_p_value_between_zero_and_one():
    found = against_control("k2", {"k2": A, "adam": [1e6, 1e6 + 1], "sgd": A})
    assert 0 <= found["adam"].p < 1e-3
    assert found["sgd"].p == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("samples", "reasons"),
    [
        ({"k2": [1.0], "adam": [2.0, 3.0]}, {"adam": "reference n=1, no test"}),
        ({"k2": [1.0, 2.0], "adam": [2.0]}, {"adam": "n=1, no test"}),
        ({"k2": [1.0], "adam": [2.0], "sgd": [2.0]}, {"adam": "n=1, no test", "sgd": "n=1, no test"}),
        ({"k2": [97.5, 97.5], "adam": [97.0, 97.0]}, {"adam": "no spread between seeds, no test"}),
        (
            {"k2": [97.5, 97.5], "adam": [97.0, 97.0], "sgd": [0.1 + 0.2, 0.3], "yogi": [1.0]},
            {"adam": "no spread between seeds, no test", "sgd": "no spread between seeds, no test",
             "yogi": "n=1, no test"},
        ),
        ({"k2": [1.0, 2.0]}, {}),
    ],
)  # fmt: skip
def test_without_a_test_there_is_a_reason_and_no_claim(samples, reasons):
    found = against_control("k2", samples)
    assert {method: each.reason for method, each in found.items()} == reasons
    for method, each in found.items():
        assert (each.p, each.interval, each.significant) == (None, None, False)
        assert each.difference == pytest.approx(np.mean(samples[method]) - np.mean(samples["k2"]))


# --- the paper's own figures ---


def test_a_published_mean_is_three_repetitions():
    found = against_published(mean_std(A), 91.20, 0.21)
    assert found.test == "Welch"
    assert found.p == pytest.approx(welch((np.mean(A), 91.20), (float(np.std(A, ddof=1)), 0.21), (3, 3)), rel=1e-6)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (against_published(mean_std([1.0]), 2.0, 0.1), "n=1, no test"),
        (against_published(mean_std([1.0, 2.0]), 2.0, None), "no std published"),
        (against_published(mean_std([1.0, 1.0]), 2.0, 0.0), "no spread between seeds, no test"),
    ],
)
def test_a_published_mean_that_cannot_be_tested_says_why(found, reason):
    assert (found.p, found.significant, found.reason) == (None, False, reason)
    assert found.difference < 0


def test_a_published_mean_is_tested_however_large_the_numbers_of_a_run_are():
    found = against_published(mean_std([1e100, -1e100, 3e99]), 91.20, 0.21)
    assert found.freedom == pytest.approx(2.0)
    assert 0 < found.p < 1
    assert all(map(math.isfinite, found.interval))
