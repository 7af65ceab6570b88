"""The verdict: who is ahead, how sure that is, and the dot plot of the differences."""

from __future__ import annotations

import pytest

from aida_lab.report.build import read, write
from aida_lab.report.verdict import dots, glance, rivals, sentence
from report_fixture import EXPERIMENTS, PERPLEXITY, spec, write_run


def write_seeds(root, method, *values, name="digits", metric=None, **hyper):
    for seed, value in enumerate(values):
        options = {"metric": metric} if metric else {}
        write_run(root, spec(method, seed, hyper, experiment=name), [value] * 4, **options)


def column_of(root):
    (column,) = read([root], declared=EXPERIMENTS).columns
    return column


def test_a_reference_that_is_ahead_names_those_it_beats(tmp_path):
    write_seeds(tmp_path, "aida-k2", 90.0, 90.1, 90.2)
    write_seeds(tmp_path, "adam", 80.0, 80.1, 80.2)
    write_seeds(tmp_path, "sgd", 90.0, 90.1, 90.0)
    assert sentence(column_of(tmp_path)) == (
        "Aida (K=2) is ahead (90.10 ± 0.10, n=3); Aida (K=2) is significantly better than Adam, "
        "not significantly different from SGD."
    )


def test_a_rival_that_is_ahead_is_named_with_its_lead_and_half_its_interval(tmp_path):
    write_seeds(tmp_path, "aida-k2", 90.0, 91.0, 90.5)
    write_seeds(tmp_path, "sgd", 90.6, 91.6, 91.1)
    column = column_of(tmp_path)
    (rival,) = rivals(column)
    low, high = rival.comparison.interval
    half = f"{(high - low) / 2:.2f}"
    assert (
        sentence(column)
        == f"SGD is ahead of Aida (K=2) by 0.60 ± {half} (not significant); no difference is significant."
    )


def test_a_better_configuration_that_the_paper_did_not_try_is_a_marked_rival(tmp_path):
    """It has one run, so it is not tested; it is ahead all the same."""
    language = {"name": "lstm1-ptb", "metric": PERPLEXITY}
    write_seeds(tmp_path, "aida-k2", 82.0, 82.2, **language)
    write_seeds(tmp_path, "adam", 84.0, 84.2, **language)
    write_seeds(tmp_path, "adam", 81.0, lr=3e-3, **language)
    column = column_of(tmp_path)
    assert [(each.name, each.standing) for each in rivals(column)] == [
        ("Adam with lr 0.003*", "ahead, not tested"), ("Adam", "better than"),
    ]  # fmt: skip
    assert sentence(column).startswith("Adam with lr 0.003* is ahead of Aida (K=2) by 1.10 (n=1, no test);")
    (row,) = glance(read([tmp_path], declared=EXPERIMENTS)).rows
    assert row[6].note == "Adam with lr 0.003*"


def test_a_better_configuration_with_several_seeds_is_tested_in_the_same_family(tmp_path):
    write_seeds(tmp_path, "aida-k2", 90.0, 90.1, name="vgg11-cifar10")
    write_seeds(tmp_path, "adam", 89.0, 89.1, name="vgg11-cifar10")
    write_seeds(tmp_path, "adam", 95.0, 95.1, name="vgg11-cifar10", lr=3e-3)
    column = column_of(tmp_path)
    better, chosen = rivals(column)
    assert (better.name, better.standing) == ("Adam with lr 0.003*", "worse than")
    assert better.comparison.test == chosen.comparison.test == "Dunnett"
    assert better.comparison.freedom == chosen.comparison.freedom == 3


def test_dots_to_the_right_are_better_whatever_the_metric(tmp_path):
    language = {"name": "lstm1-ptb", "metric": PERPLEXITY}
    write_seeds(tmp_path, "aida-k2", 82.0, 82.2, **language)
    write_seeds(tmp_path, "adam", 84.0, 84.2, **language)
    write_seeds(tmp_path, "sgd", 80.0, 80.2, **language)
    found = dots(column_of(tmp_path))
    places = {row.method: row.place for row in found.rows}
    assert places["adam"] < found.zero < places["sgd"]
    for row in found.rows:
        assert 0 < row.ends[0] < row.place < row.ends[1] < 100
        assert row.place == pytest.approx(sum(row.ends) / 2, abs=0.02)
        # significant if and only if the interval leaves out zero
        assert row.significant == (not row.ends[0] <= found.zero <= row.ends[1])


def test_a_report_without_the_papers_experiments_speaks_of_its_own_runs(tmp_path):
    write_seeds(tmp_path / "runs", "aida-k2", 90.0, 90.1)
    write_seeds(tmp_path / "runs", "adam", 80.0, 80.1)
    made = write(read([tmp_path / "runs"], declared=EXPERIMENTS), tmp_path / "out")
    text = made.page.read_text()
    assert "<h1>2 optimizers on digits</h1>" in text
    assert "Table II" not in text
    assert not [path for path in made.files if "table-" in path.name]
