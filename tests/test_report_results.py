"""From run folders to the tables: what is averaged, what is compared, what stands for a method, what is kept apart."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
import statistics

import pytest

from aida_lab.report import formats, tables
from aida_lab.report.build import read, write_tables
from aida_lab.report.collect import read_runs
from aida_lab.report.tables import census, excluded
from aida_lab.report.verdict import glance
from aida_lab.spec import Metric, PaperResult
from dunnett_by_hand import dunnett_by_hand
from report_fixture import (
    ACCURACY,
    EXPERIMENTS,
    PERPLEXITY,
    begin_run,
    experiment,
    spec,
    write_diverged_run,
    write_run,
)

#: Best epochs of vgg11-cifar10, by method and seed; the last epoch is 0.1 below.
VALUES = {
    "aida-k2": {0: 91.90, 1: 91.72, 2: 91.85},
    "aida-k1": {0: 91.60, 1: 91.55, 2: 91.41},
    "adam": {0: 90.10, 1: 89.95, 2: 90.02},
    "sgd": {3: 91.10, 4: 91.45},
}


def curve(best: float) -> list[float]:
    return [best - 20, best - 5, best, round(best - 0.1, 4)]


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    for method, found in VALUES.items():
        for seed, best in found.items():
            write_run(root, spec(method, seed), curve(best), seconds=2.0 + seed)
    return root


def results_of(*roots, reference="aida-k2", declared=EXPERIMENTS):
    return read(list(roots), reference, declared)


def column_of(results, name="vgg11-cifar10"):
    return next(each for each in results.columns if each.name == name)


def cell_of(results, method, name="vgg11-cifar10"):
    return column_of(results, name).cell(method)


def test_means_deviations_and_tests_are_those_of_an_independent_computation(runs, tmp_path):
    results = results_of(runs)
    write_tables(results, tmp_path / "tables")
    with (tmp_path / "tables" / "table-III.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file) if row["experiment"] == "vgg11-cifar10"}
    assert set(rows) == set(VALUES)
    for method, found in VALUES.items():
        row, best = rows[method], list(found.values())
        assert int(row["best_n"]) == len(best)
        assert float(row["best_mean"]) == pytest.approx(statistics.mean(best))
        assert float(row["best_std"]) == pytest.approx(statistics.stdev(best))
        assert float(row["last_mean"]) == pytest.approx(statistics.mean(best) - 0.1)
        assert float(row["seconds_mean"]) == pytest.approx(statistics.mean(2.0 + seed for seed in found))
        paper = EXPERIMENTS["vgg11-cifar10"].paper[method]
        assert float(row["paper_difference"]) == pytest.approx(statistics.mean(best) - paper.mean)
    control = list(VALUES["aida-k2"].values())
    others = {method: list(found.values()) for method, found in VALUES.items() if method != "aida-k2"}
    for (method, values), p in zip(others.items(), dunnett_by_hand(control, list(others.values())), strict=True):
        row = rows[method]
        assert (row["reference_best_test"], float(row["reference_best_freedom"])) == ("Dunnett", 7)
        assert float(row["reference_best_p"]) == pytest.approx(p, abs=5e-4)
        difference = statistics.mean(values) - statistics.mean(control)
        assert float(row["reference_best_difference"]) == pytest.approx(difference)
        assert float(row["reference_best_low"]) < difference < float(row["reference_best_high"])


def test_numbers_come_with_their_n_and_the_papers(runs):
    shown = formats.markdown(tables.comparison(column_of(results_of(runs))))
    line = next(line for line in shown.splitlines() if line.startswith("| Aida (K=2)"))
    assert "91.82 ± 0.09" in line
    assert "| 3 |" in line
    assert "91.68 ± 0.16" in line
    assert "+0.14" in line
    assert "paper 7.95" in line
    assert "91.82 ± 0.09, n=3 (paper 91.68 ± 0.16)" in formats.markdown(tables.overview(results_of(runs).paper[1]))


def test_a_winner_is_bold_only_if_every_difference_is_significant(tmp_path):
    def leads(values):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for method, found in values.items():
            for seed, best in enumerate(found):
                write_run(root, spec(method, seed), curve(best))
        return {cell.method: cell.leads for cell in column_of(results_of(root)).cells if cell.chosen}

    far = {"aida-k2": [91.90, 91.91, 91.92], "adam": [80.01, 80.02, 80.01], "sgd": [70.0, 70.02, 70.03]}
    assert leads(far) == {"aida-k2": {"best", "last"}, "adam": set(), "sgd": set()}
    assert not any(leads({**far, "aida-k1": [91.90, 91.80, 91.95]}).values())  # one without a significant difference
    assert not any(leads({**far, "yogi": [60.0]}).values())  # one that cannot be tested
    assert leads({**far, "sgd": [99.0, 99.02, 99.03]})["sgd"] == {"best", "last"}  # not only the reference may lead
    assert not any(leads({"aida-k2": [91.90, 91.91, 91.92]}).values())  # nobody to beat


def test_nothing_is_bold_without_its_test(runs):
    results = results_of(runs)
    for column in results.columns:
        for row in tables.comparison(column).rows:
            method = next(cell for cell in column.cells if tables.title(cell.method) == row[0].text)
            for field in row:
                if field.bold:
                    tested = [found.p for found in method.against_reference.values()]
                    assert method.leads or any(p is not None and p < 0.05 for p in tested)


def test_a_table_says_what_bold_means_in_it(tmp_path):
    for method, level in (("aida-k2", 91.0), ("adam", 80.0), ("sgd", 70.0)):
        for seed in range(2):
            write_run(tmp_path, spec(method, seed), curve(level + seed / 100))
    for rest, said in (("", True), ("yogi", False)):  # a method with one run, which nobody has beaten by a test
        if rest:
            write_run(tmp_path, spec(rest, 0), curve(60.0))
        results = results_of(tmp_path)
        grids = [tables.overview(results.paper[1]), tables.comparison(column_of(results))]
        for grid in grids:
            assert any("Bold mean: the best of its column" in remark for remark in grid.remarks) is said
            assert any(field.bold for row in grid.rows for field in row if "±" in field.text) is said
        assert "Bold p-value: below 0.05." in grids[1].remarks


def test_one_seed_says_so_instead_of_a_test(runs):
    write_run(runs, spec("yogi", 0), curve(88.0))
    found = cell_of(results_of(runs), "yogi")
    assert found.against_reference["best"].reason == "n=1, no test"
    assert "n=1, no test" in formats.markdown(tables.comparison(column_of(results_of(runs))))


def test_a_method_that_is_equally_far_behind_on_every_seed_is_tested(runs):
    for seed, best in VALUES["aida-k2"].items():
        write_run(runs, spec("adabelief", seed), curve(round(best - 0.34, 4)))
    column = column_of(results_of(runs))
    assert column.cell("adabelief").against_reference["best"].p is not None
    assert "no spread" not in formats.markdown(tables.comparison(column))


def test_lower_is_better_where_the_metric_says_so(tmp_path):
    for seed in range(3):
        for method, level in (("aida-k2", 81.0), ("adam", 84.0)):
            wanted = spec(method, seed, experiment="lstm1-ptb")
            write_run(
                tmp_path, wanted, [99.0, 90.0, level + 0.1 * seed**2 * (level > 82), level + 1], metric=PERPLEXITY
            )
    results = results_of(tmp_path)
    row = glance(results).rows[0]
    assert row[3].text == "1 of 1"
    assert row[3].note == "Adam"
    assert cell_of(results, "aida-k2", "lstm1-ptb").mean_std("best").mean == pytest.approx(81.0)


def test_experiments_and_methods_without_runs_are_named_and_have_no_column_and_no_row(runs):
    results = results_of(runs)
    table = results.paper[1]
    assert table.missing == (("resnet34 on cifar10", "resnet34-cifar10"),)
    assert [each.name for each in table.columns] == ["vgg11-cifar10"]
    assert [head.text for head in tables.overview(table).heads] == ["method", "vgg11 on cifar10"]
    for folder in list(runs.iterdir()):
        if '"sgd"' in (folder / "spec.json").read_text():
            shutil.rmtree(folder)
    found = tables.comparison(column_of(results_of(runs)))
    assert "SGD" not in [row[0].text for row in found.rows]
    assert any("Without runs here" in remark and "SGD (91.36 ± 0.07)" in remark for remark in found.remarks)


# --- searches ---


def test_the_best_configuration_stands_for_its_method(runs):
    for eps, best in ((1e-4, 91.0), (1e-6, 88.0)):
        for seed in range(3):
            write_run(runs, spec("adam", seed, {"eps": eps}), curve(best + 0.01 * seed))
    found = cell_of(results_of(runs), "adam")
    assert found.chosen.hyper["eps"] == 1e-4
    assert found.tried == 3
    assert found.mean_std("best").mean == pytest.approx(91.01)
    listed = tables.search(column_of(results_of(runs)))
    assert [row[1].text for row in listed.rows if row[0].text == "Adam"] == ["eps 1e-4", "eps 1e-8", "eps 1e-6"]
    assert [row[-1].text for row in listed.rows if row[0].text == "Adam"] == ["chosen", "", ""]


def test_a_lucky_single_run_does_not_displace_a_repeated_configuration(runs):
    write_run(runs, spec("adam", 0, {"eps": 1e-4}), curve(95.0))
    results = results_of(runs)
    assert cell_of(results, "adam").chosen.hyper["eps"] == 1e-8
    said = "Adam: a better mean, 95.00 (n=1), with fewer seeds"
    assert any(remark.startswith(said) for remark in tables.comparison(column_of(results)).remarks)


def test_values_that_the_paper_did_not_try_do_not_displace_those_it_did(runs):
    for seed, best in enumerate((95.0, 95.1, 95.2)):
        write_run(runs, spec("adam", seed, {"lr": 3e-3}), curve(best))  # the paper's Adam has 1e-3 and searches eps
    results = results_of(runs)
    found = cell_of(results, "adam")
    assert found.chosen.hyper["lr"] == 1e-3
    assert found.best_run(ACCURACY)[0] == 90.10
    assert found.against_paper.p is not None
    said = "Adam: a better mean, 95.10 ± 0.10 (n=3), with lr 0.003, which is not among the paper's values; − Aida"
    assert any(remark.startswith(said) for remark in tables.comparison(column_of(results)).remarks)
    listed = [row for row in tables.search(column_of(results)).rows if row[0].text == "Adam"]
    assert [row[-1].text for row in listed] == ["chosen", "not the paper's values"]


def test_values_that_the_paper_did_not_try_are_not_tested_against_its_figure(runs):
    for seed in range(3):  # a method without a figure of the paper has no untried values
        write_run(runs, spec("yogi", seed, {"lr": 3e-3}), curve(90.0 + seed))
    for seed in range(4):  # one seed more than the paper's values have
        write_run(runs, spec("adam", seed, {"lr": 3e-3}), curve(95.0 + 0.1 * seed))
    results = results_of(runs)
    found = cell_of(results, "adam")
    assert found.chosen.untried == {"lr": 3e-3}
    assert found.against_paper.p is None
    assert found.against_paper.reason == "not the paper's values, no test"
    assert found.best_run(ACCURACY)[0] == pytest.approx(95.3)
    assert not cell_of(results, "yogi").chosen.untried
    assert "Adam: lr 0.003 is not among the paper's values." in tables.comparison(column_of(results)).remarks
    assert "95.15 ± 0.13, n=4, not the paper's values" in formats.markdown(tables.overview(results.paper[1]))
    written = list(csv.DictReader(formats.configurations_csv(results.columns).splitlines()))
    assert [row["not_the_papers"] for row in written if row["method"] == "adam"] == ["lr 0.003", ""]


def test_seeds_that_diverged_are_counted_and_have_no_number(runs):
    write_diverged_run(runs, spec("adam", 3))
    results = results_of(runs)
    found = cell_of(results, "adam")
    assert (len(found.chosen.counted), found.diverged) == (3, 1)
    assert found.mean_std("best").mean == pytest.approx(statistics.mean(VALUES["adam"].values()))
    assert "1 diverged" in formats.markdown(tables.comparison(column_of(results)))
    assert ["diverged", "loss is NaN"] in [[row[1].text, row[6].text] for row in excluded(results).rows]


def test_the_survivors_of_diverged_seeds_are_not_tested_and_lead_nothing(tmp_path):
    runs = tmp_path / "runs"
    for seed, value in enumerate((93.0, 93.1, 93.05)):
        write_run(runs, spec("adabelief", seed), curve(value))
        write_run(runs, spec("aida-k2", seed), curve(VALUES["aida-k2"][seed]))
    assert cell_of(results_of(runs), "adabelief").leads == {"best", "last"}
    write_diverged_run(runs, spec("adabelief", 3))
    results = results_of(runs)
    found = cell_of(results, "adabelief")
    assert found.against_reference["best"].p is None
    assert "seeds diverged, no test" in formats.markdown(tables.comparison(column_of(results)))
    assert not any(cell.leads for cell in column_of(results).cells)
    assert "93.05 ± 0.05, n=3, 1 diverged" in formats.markdown(tables.overview(results.paper[1]))
    (row,) = [row for row in glance(results).rows if row[0].text == "vgg11 on cifar10"]
    assert [field.text for field in row[3:]] == ["none", "none", "none", "1 of 1", "none"]
    assert row[6].note == "AdaBelief"


def test_a_reference_with_diverged_seeds_is_compared_with_nothing(runs):
    write_diverged_run(runs, spec("aida-k2", 3))
    results = results_of(runs)
    assert all(found.p is None for cell in column_of(results).cells for found in cell.against_reference.values())
    assert any("n=3, 1 diverged" in field.text for row in glance(results).rows for field in row)


def test_of_two_configurations_the_one_whose_seeds_diverged_stands_behind(runs):
    for seed in range(3):
        write_run(runs, spec("adam", seed, {"eps": 1e-4}), curve(95.0))
    assert cell_of(results_of(runs), "adam").chosen.hyper["eps"] == 1e-4
    write_diverged_run(runs, spec("adam", 3, {"eps": 1e-4}))
    assert cell_of(results_of(runs), "adam").chosen.hyper["eps"] == 1e-8


def test_a_configuration_tried_in_several_shortened_ways_was_tried_once(runs):
    for epochs in (1, 2, 3):
        for eps in (1e-3, 1e-4):
            write_run(runs, spec("adam", 0, {"eps": eps}, epochs=epochs), [80.0] * epochs)
    assert cell_of(results_of(runs), "adam").elsewhere == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 2}, "2 of 4 epochs"),
        ({"limit": 5}, "at most 5 batches per epoch"),
        ({"warmup": 9}, "a warm-up of 9 steps"),
        ({"batch": 16}, "batch 16 instead of 8"),
        ({"epochs": 8}, "8 of 4 epochs"),
    ],
)
def test_runs_that_are_not_as_declared_are_kept_apart_and_marked(runs, changes, words):
    for seed in range(3):
        shortened = spec("adam", seed, {"eps": 1e-3}, **changes)
        write_run(runs, shortened, [99.0] * shortened.epochs)
    results = results_of(runs)
    assert cell_of(results, "adam").mean_std("best").mean < 91
    assert cell_of(results, "adam").elsewhere == 1
    (shortened,) = results.shortened.columns
    assert words in shortened.title
    assert shortened.cell("adam").paper is None
    assert "99.00" in formats.markdown(tables.comparison(shortened))
    assert not any("99.0" in formats.markdown(tables.overview(table)) for table in results.paper)
    assert "1 shortened" in formats.markdown(tables.comparison(column_of(results)))


def test_precisions_are_not_mixed(runs):
    for seed in range(3):
        write_run(runs, spec("adam", seed, precision="bf16"), curve(99.0))
    titles = [each.title for each in results_of(runs).columns]
    assert titles == ["vgg11 on cifar10, bf16", "vgg11 on cifar10, fp32"]
    assert cell_of(results_of(runs), "adam").mean_std("best").n == 3


def test_the_papers_figures_stand_beside_their_variant_alone(tmp_path):
    other = Metric("frechet", "Fréchet distance on other features", "lower")
    declared = experiment(
        "wgan", "IV", metrics={"default": other, "inception": Metric("fid", "FID", "lower")},
        paper={"aida-k2": PaperResult(55.7)}, paper_variant="inception",
    )  # fmt: skip
    for seed in range(2):
        write_run(tmp_path, spec("aida-k2", seed, experiment="wgan"), [9.0, 8.0, 7.0, 6.0 + seed], metric=other)
    (table,) = results_of(tmp_path, declared={"wgan": declared}).paper
    (measured,) = table.columns
    assert table.missing == (("wgan, inception", "wgan"),)
    assert measured.cell("aida-k2").paper is None
    assert measured.cell("aida-k2").against_paper is None
    assert any("the variant 'inception'" in remark for remark in tables.comparison(measured).remarks)
    write_run(
        tmp_path, spec("aida-k2", 0, experiment="wgan", variant="inception"), [9.0, 8.0, 57.0, 56.7],
        metric=declared.metrics["inception"],
    )  # fmt: skip
    (table,) = results_of(tmp_path, declared={"wgan": declared}).paper
    assert [each.title for each in table.columns] == ["wgan, inception", "wgan"]
    assert table.columns[0].cell("aida-k2").against_paper.difference == pytest.approx(8.0 - 55.7)


def test_a_published_best_is_compared_with_our_best_run(tmp_path):
    metric = Metric("fid", "FID", "lower")
    paper = {"aida-k2": PaperResult(55.7, best=True)}
    declared = {"wgan": experiment("wgan", "IV", metric, paper=paper)}
    for seed, value in enumerate((55.7, 60.0, 64.0)):
        write_run(tmp_path, spec("aida-k2", seed, experiment="wgan"), [90.0, 80.0, 70.0, value], metric=metric)
    results = results_of(tmp_path, declared=declared)
    found = cell_of(results, "aida-k2", "wgan").against_paper
    assert (found.difference, found.p) == (pytest.approx(0.0), None)
    assert {"the best of all runs", "our best run minus the paper's"} <= {
        head.note for head in tables.comparison(column_of(results, "wgan")).heads
    }


# --- what is amiss ---


def test_unfinished_failed_and_damaged_runs_are_listed_and_not_averaged(runs):
    before = cell_of(results_of(runs), "adam").mean_std("best")
    begin_run(runs, spec("adam", 5), [50.0])
    failed = begin_run(runs, spec("adam", 6), [50.0, 51.0])
    (failed / "failed.json").write_text(json.dumps({"error": "RuntimeError: out of memory", "trace": "..."}))
    torn = write_run(runs, spec("adam", 7), curve(99.0))
    (torn / "result.json").write_text('{"state": "finished", "best": 99')
    lost = write_run(runs, spec("adam", 8), curve(99.0))
    (lost / "curve.jsonl").write_text("")
    unreadable = write_run(runs, spec("adam", 9), curve(99.0))
    (unreadable / "spec.json").write_text("not json")
    results = results_of(runs)
    assert cell_of(results, "adam").mean_std("best") == before
    assert cell_of(results, "adam").open == 4
    said = {row[0].text: (row[1].text, row[6].text) for row in excluded(results).rows}
    assert len(said) == 5
    assert said[str(failed)] == ("failed", "RuntimeError: out of memory")
    assert said[str(torn)][0] == "damaged"
    assert "result.json" in said[str(torn)][1]
    assert said[str(lost)][0] == "damaged"
    assert said[str(unreadable)][0] == "not read"
    assert "spec.json is damaged" in said[str(unreadable)][1]
    assert census(results) == "11 finished, 2 damaged, 1 failed, 1 stopped, 1 folder not read"


def test_a_method_without_a_finished_run_says_why(runs):
    begin_run(runs, spec("yogi", 0), [50.0])
    assert "1 run not finished" in formats.markdown(tables.comparison(column_of(results_of(runs))))


def test_a_run_in_two_folders_counts_once(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "copy")
    (first,) = (folder for folder in (tmp_path / "copy").iterdir() if folder.name == spec("adam", 0).key)
    (first / "result.json").unlink()
    for roots in ((runs, tmp_path / "copy"), (tmp_path / "copy", runs)):
        results = results_of(*roots)
        assert cell_of(results, "adam").mean_std("best").n == 3
        assert len(results.collection.unread) == len(results.collection.runs) == 11


def test_a_seed_measured_with_and_without_a_probe_counts_once(runs):
    write_run(runs, spec("adam", 0, probe_every=10), curve(99.0))
    results = results_of(runs)
    assert cell_of(results, "adam").mean_std("best").mean == pytest.approx(statistics.mean(VALUES["adam"].values()))
    assert [row[1].text for row in excluded(results).rows] == ["repeat"]


def test_only_a_run_that_had_its_gpu_to_itself_is_timed(tmp_path):
    for seed, session in enumerate(({"at_once": 1}, {"at_once": 8}, {})):
        found = {"device": "NVIDIA H200", "device_type": "cuda", "started": f"2026-01-01T0{seed}:00:00", **session}
        write_run(tmp_path / "runs", spec("adam", seed), curve(90.0), seconds=1.0 + seed, **found)
        found |= {"at_once": 8, "started": f"2026-01-02T0{seed}:00:00"}
        write_run(tmp_path / "runs", spec("sgd", seed), curve(90.0), **found)
    results = results_of(tmp_path / "runs")
    assert cell_of(results, "adam").chosen.seconds().mean == 1.0
    assert cell_of(results, "sgd").chosen.seconds() is None
    assert column_of(results).timed
    drawn = tables.comparison(column_of(results))
    written = {row[0].text: row[4].text for row in drawn.rows}
    assert (written["Adam"], written["SGD"]) == ("1.00", "not timed")


def test_runs_of_two_commands_at_the_same_time_are_not_timed(tmp_path):
    """Each says it was alone, as its command knew of no other; four epochs of 1.1 s give the lie to two of them."""
    for seed, (started, device) in enumerate(
        [("00:00:00", "NVIDIA H200"), ("00:00:04", "NVIDIA H200"), ("00:00:09", "NVIDIA H200"), ("00:00:01", "another")]
    ):
        write_run(
            tmp_path, spec("sgd", seed), curve(90.0), device=device, device_type="cuda", at_once=1,
            started=f"2026-01-01T{started}+00:00",
        )  # fmt: skip
    runs = {run.spec.seed: run for run in read_runs([tmp_path], EXPERIMENTS).runs}
    assert {seed: run.seconds for seed, run in runs.items()} == {0: None, 1: None, 2: 1.0, 3: 1.0}


def test_a_run_that_went_on_later_was_on_the_gpu_until_it_stopped(tmp_path):
    folder = write_run(tmp_path, spec("sgd", 0), curve(90.0), device="NVIDIA H200", device_type="cuda", at_once=1)
    session = json.loads((folder / "env.json").read_text())["sessions"][0]
    moments = ("2026-01-01T00:00:00+00:00", "2026-01-01T00:00:02+00:00", None)
    (folder / "env.json").write_text(json.dumps({"sessions": [{**session, "started": moment} for moment in moments]}))
    (run,) = read_runs([tmp_path], EXPERIMENTS).runs
    (device, first, end), (_, second, last) = run.on_gpu
    assert device == "NVIDIA H200"
    assert (end - first, second - end, round(last - second, 3)) == (2.0, 0.0, 4.4)
    assert run.seconds == 1.0


def test_a_run_measured_by_something_else_is_not_averaged(runs):
    write_run(runs, spec("adam", 5), [1.0, 2.0, 3.0, 4.0], metric=dataclasses.replace(ACCURACY, key="fid"))
    results = results_of(runs)
    assert cell_of(results, "adam").mean_std("best").n == 3
    assert [row[1].text for row in excluded(results).rows] == ["other metric"]


def test_runs_of_an_experiment_that_is_not_known_are_shown_by_their_own_metric(runs):
    for epochs in (4, 2):
        wanted = spec("adam", 0, experiment="mine", epochs=epochs)
        write_run(runs, wanted, [3.0, 2.0, 2.5, 2.6][:epochs], metric=Metric("valid_loss", "", "lower"))
    results = results_of(runs)
    assert [each.title for each in results.others.columns] == ["mine, 2 epochs, batch 8", "mine, 4 epochs, batch 8"]
    assert results.others.columns[0].cell("adam").mean_std("best").mean == 2.0
    assert len({each.id for each in results.columns}) == len(results.columns)


def test_a_reference_without_runs_leaves_means_and_no_tests(runs):
    results = results_of(runs, reference="fromage")
    assert all(not cell.against_reference for cell in column_of(results).cells)
    assert any("No test: Fromage" in remark for remark in tables.comparison(column_of(results)).remarks)


def test_an_empty_folder_gives_tables_without_runs(tmp_path):
    results = results_of(tmp_path)
    assert results.columns == []
    assert results.tables == ()
    assert [table.name for table in results.paper] == ["table-II", "table-III"]
    assert census(results) == "no runs"


# --- formats ---


def test_latex_rows_have_as_many_fields_as_the_table_columns(runs, tmp_path):
    write_run(runs, spec("torch.optim:NAdam", 0, {"lr": 1e-3, "weird_name": 1}), curve(90.0))
    write_tables(results_of(runs), tmp_path)
    text = (tmp_path / "table-III.tex").read_text()
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    for part in text.split(r"\begin{tabular}{")[1:]:
        columns = part.index("}")
        for line in part.splitlines():
            if line.endswith(r"\\"):
                assert line.replace(r"\&", "").count("&") == columns - 1
    assert "±" not in text
    assert "_" not in text.replace(r"\_", "").replace(r"\label", "")


def test_markdown_rows_have_as_many_fields_as_their_head(runs, tmp_path):
    folder = begin_run(runs, spec("adam", 6), [50.0])
    (folder / "failed.json").write_text(json.dumps({"error": "a | b <script> *c*", "trace": ""}))
    write_tables(results_of(runs), tmp_path)
    for path in tmp_path.glob("*.md"):
        width = 0
        for line in path.read_text().splitlines():
            bars = line.replace(r"\|", "").count("|")
            width = bars if line.startswith("|") and not width else width if line.startswith("|") else 0
            assert not line.startswith("|") or bars == width
    assert r"a \| b \<script> \*c\*" in (tmp_path / "excluded.md").read_text()


def test_every_run_is_in_the_list_of_runs(runs, tmp_path):
    begin_run(runs, spec("yogi", 0), [50.0])
    write_tables(results_of(runs), tmp_path)
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {folder.name for folder in runs.iterdir()}
    assert {row["hyper.eps"] for row in rows if row["method"] == "adam"} == {"1e-08"}
