"""What a report says of learning-rate sweeps, against the runs' own files: sensitivity, best of k, time to target."""

from __future__ import annotations

import json
import statistics
from itertools import combinations
from pathlib import Path

import pytest

from aida_lab.report import charts, tables
from aida_lab.report.build import read, write
from aida_lab.report.page import payload
from aida_lab.report.sweeps import expected_best
from aida_lab.report.tuning import target, tuning
from aida_lab.spec import Metric
from report_fixture import EXPERIMENTS, PERPLEXITY, experiment, spec, write_diverged_run, write_run

RATES = (1e-4, 3.16e-4, 1e-3, 3.16e-3, 1e-2, 3.16e-2, 1e-1)

#: Accuracy at the best epoch of seed 0, by method and learning rate; None diverges.
GRIDS = {
    "adamw": (60.0, 80.0, 90.0, 92.5, 91.0, 70.0, None),
    "sgd": (10.0, 55.0, 71.0, 88.0, 91.9, 91.9, 20.0),
    "aida-k2": (85.0, 91.0, 93.0, 92.0, 60.0, None, None),
}
#: Of the fresh seeds, at the best learning rate: adamw's median is 91.
FRESH = {"adamw": (90.5, 91.0, 92.0), "sgd": (90.0, 89.0, 91.5), "aida-k2": (92.8, 92.2, 91.1)}
BEST = {"adamw": 3.16e-3, "sgd": 1e-2, "aida-k2": 1e-3}


def curve(best: float) -> list[float]:
    return [best - 3, best - 1, best, best - 0.5]


def write_sweep(root: Path, method: str, grid, fresh=(), hyper=None, **changes) -> None:
    values = dict(zip(RATES, grid, strict=False))
    for lr, value in values.items():
        wanted = spec(method, 0, {"lr": lr, **(hyper or {})}, **changes)
        if value is None:
            write_diverged_run(root, wanted)
        else:
            write_run(root, wanted, curve(value), seconds=2.0)
    known = {lr: value for lr, value in values.items() if value is not None}
    lr = max(known, key=lambda each: known[each])
    for seed, value in enumerate(fresh, start=1):
        write_run(root, spec(method, seed, {"lr": lr, **(hyper or {})}, **changes), curve(value), seconds=2.0)


@pytest.fixture
def root(tmp_path):
    for method, grid in GRIDS.items():
        write_sweep(tmp_path / "runs", method, grid, FRESH[method])
    return tmp_path / "runs"


def column_of(root: Path, declared=EXPERIMENTS, name="vgg11-cifar10"):
    return next(each for each in read([root], "aida-k2", declared).columns if each.name == name)


def view(root: Path, name: str) -> dict:
    results = read([root], "aida-k2", EXPERIMENTS)
    (column,) = payload(results, root)["columns"]
    return {each["method"]: each for view in column["views"] if view["name"] == name for each in view["series"]}


def from_files(root: Path) -> dict[str, dict[tuple[float, int], list[dict]]]:
    """The rows of every curve by method, learning rate and seed, read without the lab; of finished runs."""
    found: dict = {}
    for folder in root.iterdir():
        known = json.loads((folder / "spec.json").read_text())
        hyper = known["hyper"]
        method = f"aida-k{hyper['projections']}" if known["optimizer"] == "aida" else known["optimizer"]
        if json.loads((folder / "result.json").read_text())["state"] == "finished":
            rows = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
            found.setdefault(method, {})[hyper["lr"], known["seed"]] = rows
    return found


def best(rows: list[dict]) -> float:
    return max(row["accuracy"] for row in rows)


def test_the_sensitivity_is_each_tuning_runs_best_over_its_learning_rate_with_the_best_marked(root):
    shown = view(root, "sensitivity")
    for method, runs in from_files(root).items():
        tuned = {lr: best(rows) for (lr, seed), rows in runs.items() if seed == 0}
        assert dict(zip(shown[method]["x"], shown[method]["y"], strict=True)) == pytest.approx(tuned)
        marked = [lr for lr, ring in zip(shown[method]["x"], shown[method]["best"], strict=True) if ring]
        assert marked == [BEST[method]]
    assert set(shown) == set(GRIDS)


def test_best_of_k_is_the_mean_of_the_best_over_all_draws_of_k_with_diverged_runs_the_worst(root):
    shown = view(root, "best-of-k")
    worst = min(value for grid in GRIDS.values() for value in grid if value is not None)
    for method, grid in GRIDS.items():
        values = [worst if value is None else value for value in grid]
        by_hand = [statistics.mean(map(max, combinations(values, k))) for k in range(1, len(values) + 1)]
        assert shown[method]["x"] == list(range(1, 8))
        assert shown[method]["y"] == pytest.approx(by_hand, rel=1e-4)


def test_best_of_k_of_a_loss_is_its_expected_least():
    values = [3.0, 1.0, 8.0, 2.0]
    by_hand = [statistics.mean(map(min, combinations(values, k))) for k in range(1, 5)]
    assert expected_best(values, Metric("loss", "loss", "lower")) == pytest.approx(by_hand)


def test_the_target_is_adamws_median_and_each_method_reaches_it_when_its_curves_do(root):
    column = column_of(root)
    setter, aim = target(column)
    runs = from_files(root)
    fresh = {method: [rows for (_, seed), rows in found.items() if seed > 0] for method, found in runs.items()}
    assert setter.method == "adamw"
    assert aim == statistics.median(map(best, fresh["adamw"])) == 91.0
    table = tuning(column)
    heads = [head.text for head in table.heads]
    for row in table.rows:
        cells = dict(zip(heads, row, strict=True))
        method = {"AdamW": "adamw", "SGD": "sgd", "Aida (K=2)": "aida-k2"}[cells["method"].text]
        first = [next((row for row in rows if row["accuracy"] >= aim), None) for rows in fresh[method]]
        reached = [row for row in first if row]
        assert cells["reached"].text == f"{len(reached)} of 3"
        if len(reached) == 1:
            assert cells["epochs to target"].text == "not reached"
            assert cells["steps to target"].text == cells["seconds to target"].text == ""
            continue
        late = [float("inf")] * (3 - len(reached))
        assert cells["epochs to target"].order == statistics.median([*(row["epoch"] for row in reached), *late])
        assert cells["steps to target"].order == statistics.median([*(row["step"] for row in reached), *late])
        assert cells["seconds to target"].order == statistics.median([*(2.0 * row["epoch"] for row in reached), *late])
        assert cells["best"].order == BEST[method]
        assert cells["fresh seeds"].order == pytest.approx(statistics.mean(map(best, fresh[method])))
    assert sorted(row[heads.index("reached")].text for row in table.rows) == ["1 of 3", "2 of 3", "3 of 3"]


def test_runs_that_shared_a_device_have_no_seconds_to_the_target(root):
    for env in root.glob("*/env.json"):
        (session,) = json.loads(env.read_text())["sessions"]
        env.write_text(json.dumps({"sessions": [{**session, "at_once": 4}]}))
    assert "seconds to target" not in [head.text for head in tuning(column_of(root)).heads]


def test_a_tuned_methods_mean_contains_its_fresh_seeds_alone(root):
    column = column_of(root)
    for method, values in FRESH.items():
        cell = column.cell(method)
        assert cell.chosen.hyper["lr"] == BEST[method]
        assert cell.chosen.values("best") == list(values)
        assert cell.mean_std("best").mean == pytest.approx(statistics.mean(values))
        assert len(cell.chosen.runs) == 4
    remarks = tables.comparison(column).remarks
    assert "Tuned with seed 0, which no mean contains: Aida (K=2), SGD, AdamW." in remarks


def test_a_lucky_tuning_run_at_another_learning_rate_is_no_better_configuration(root):
    cell = column_of(root).cell("sgd")
    assert cell.mean_std("best").mean < 91  # the run at 3.16e-2 had 91.9
    assert cell.better is None


def test_a_few_learning_rates_with_the_same_seeds_keep_all_their_seeds(tmp_path):
    for lr in RATES:
        for seed in range(3):
            write_run(tmp_path, spec("adamw", seed, {"lr": lr}), curve(90 + seed - 100 * lr))
    cell = column_of(tmp_path).cell("adamw")
    assert [run.spec.seed for run in cell.chosen.counted] == [0, 1, 2]


@pytest.mark.parametrize(("methods", "rates"), [(("adamw", "sgd"), 2), (("adamw",), 7)])
def test_two_learning_rates_or_one_method_add_nothing_to_a_report(tmp_path, methods, rates):
    for method in methods:
        write_sweep(tmp_path / "runs", method, GRIDS[method][:rates])
    column = column_of(tmp_path / "runs")
    assert tuning(column) is None
    assert {"sensitivity", "best-of-k"}.isdisjoint(each.name for each in charts.views(column, [1, 2, 3, 4]))
    made = write(read([tmp_path / "runs"], "aida-k2", EXPERIMENTS), tmp_path / "out")
    assert "uning" not in made.page.read_text().partition('<script type="application/json"')[0]


def test_variants_of_a_method_are_sweeps_of_their_own_with_names_of_their_own(tmp_path):
    root = tmp_path / "runs"
    for eps, shift in ((1e-8, 0.0), (1e-16, -1.0)):
        grid = [value if value is None else value + shift for value in GRIDS["aida-k2"]]
        write_sweep(root, "aida-k2", grid, [value + shift for value in FRESH["aida-k2"]], {"eps": eps})
    column = column_of(root)
    assert [each.name for each in column.sweeps] == ["aida-k2 eps 1e-16", "aida-k2 eps 1e-8"]
    assert [row[0].text for row in tuning(column).rows] == ["Aida (K=2), eps 1e-16", "Aida (K=2), eps 1e-8"]
    assert column.cell("aida-k2").chosen.hyper["eps"] == 1e-8
    assert any("the best of 2 tuned variants" in said for said in tables.comparison(column).remarks)
    assert target(column)[0].name == "aida-k2 eps 1e-16"  # no adamw: the first of the reference
    write(read([root], "aida-k2", EXPERIMENTS), tmp_path / "out")


def test_a_lower_metric_is_tuned_downwards(tmp_path):
    declared = {"lstm1-ptb": experiment("lstm1-ptb", "", PERPLEXITY)}
    for method, least in (("adamw", 3.16e-3), ("sgd", 1e-2)):
        for lr in RATES:
            value = 80 + 5 * abs(RATES.index(lr) - RATES.index(least))
            wanted = spec(method, 0, {"lr": lr}, experiment="lstm1-ptb")
            write_run(tmp_path, wanted, [value + 9, value, value + 1, value + 1], metric=PERPLEXITY)
    column = column_of(tmp_path, declared, "lstm1-ptb")
    assert {each.method: each.best for each in column.sweeps} == {"adamw": 3.16e-3, "sgd": 1e-2}
    assert all(row[-1].text == "80.00" for row in tuning(column).rows)  # no fresh seeds, so no target


def test_the_same_runs_give_the_same_bytes_and_the_figures_are_written(root, tmp_path):
    for out in ("one", "two"):
        write(read([root], "aida-k2", EXPERIMENTS), tmp_path / out)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert {"sensitivity-table-III.svg", "best-of-k-table-III.png"} <= {path.name for path in files}
    assert all((tmp_path / "one" / each).read_bytes() == (tmp_path / "two" / each).read_bytes() for each in files)
    text = (tmp_path / "one" / "tables" / "table-III.md").read_text()
    assert "not reached" in text
    assert "Target: 91.00, the median of AdamW" in text
