"""``aida tune``: one grid for every method, its best inside, fresh seeds at it, the same result after any stop."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tuned_runs
from aida_lab.cli import app
from aida_lab.experiments import find_experiment
from aida_lab.parsing import UsageError
from aida_lab.report.sweeps import choose
from aida_lab.request import RunRequest
from aida_lab.runs.records import read_curve, scan
from aida_lab.spec import Metric
from aida_lab.stopping import Stop
from aida_lab.training.options import Options
from aida_lab.tuning import FACTOR, LONGEST, Method, Protocol, method_of, parse_lrs
from aida_lab.workers.jobs import Jobs

HIGHER, LOWER = Metric("accuracy", "accuracy", "higher"), Metric("loss", "loss", "lower")
REQUEST = RunRequest(find_experiment("digits"), epochs=3)


def method(text: str = "adamw", lrs: tuple[float, ...] = (), seeds: tuple[int, ...] = (1, 2, 3)) -> Method:
    return method_of(text, REQUEST, lrs, seeds)


def bump(place: int, at: float) -> float:
    return 90 - (place - at) ** 2


# --- the plan ---


@pytest.mark.parametrize("name", ["aida", "adamw", "sgd", "sgd:lr=0.02", "torch.optim:NAdam"])
def test_every_grid_has_seven_rates_a_root_of_ten_apart_around_the_methods_own(name):
    found = method(name)
    rates = [found.lr(place) for place in found.grid]
    own = {"sgd": 0.1, "sgd:lr=0.02": 0.02, "torch.optim:NAdam": 2e-3}.get(name, 1e-3)
    assert len(rates) == 7
    assert rates[3] == own
    assert all(high / low == pytest.approx(FACTOR, rel=0.01) for low, high in pairwise(rates))


@pytest.mark.parametrize("at", [-2, -1, 0, 1.4, 2])
def test_a_grid_whose_best_is_inside_is_not_extended(at):
    found = method()
    assert found.places({place: bump(place, at) for place in range(-20, 20)}) == found.grid


@pytest.mark.parametrize("at", [-6, -4, -3, 3, 4, 6])
def test_a_grid_grows_past_its_edge_until_the_best_is_inside_and_no_further(at):
    found = method().places({place: bump(place, at) for place in range(-20, 20)})
    assert found == (range(-3, at + 2) if at > 0 else range(at - 1, 4))
    assert found[0] < at < found[-1]


def test_a_grid_grows_by_one_run_at_a_time_and_only_if_all_its_results_are_known():
    found, known = method(), {place: float(place) for place in range(-3, 3)}
    assert found.places(known) == range(-3, 4)
    assert found.places({**known, 3: 3.0}) == range(-3, 5)
    assert found.places({**known, 3: 3.0, 4: 4.0}) == range(-3, 6)


@pytest.mark.parametrize("value", [float, lambda place: -float(place), lambda place: None])
def test_a_grid_without_a_best_inside_ends_at_twice_its_size(value):
    found = method()
    places = found.places({place: value(place) for place in range(-50, 50)})
    assert len(places) == LONGEST * len(found.grid)


def test_if_every_run_diverged_smaller_rates_are_tried():
    found = method()
    values = dict.fromkeys(range(-3, 4))
    assert found.places(values) == range(-4, 4)
    assert found.places({**values, -4: None, -5: 20.0, -6: 10.0}) == range(-6, 4)


def test_a_refined_grid_adds_both_neighbours_of_the_best_when_it_is_known():
    found = replace(method(), refine=True)
    values = {place: bump(place, 4.2) for place in range(-3, 6)}
    assert found.places({place: values[place] for place in range(-3, 4)}) == range(-3, 5)
    assert found.places(values) == [-3, -2, -1, 0, 1, 2, 3, 3.5, 4, 4.5, 5]
    assert found.places({**values, 3.5: 99.0, 4.5: 0.0}) == [-3, -2, -1, 0, 1, 2, 3, 3.5, 4, 4.5, 5]
    assert (found.lr(-0.5), found.lr(0), found.lr(0.5)) == (5.62e-4, 1e-3, 1.78e-3)


def test_a_grid_is_refined_inside_only():
    found = replace(method(), refine=True)
    places = found.places({place: float(place) for place in range(-50, 50)})
    assert places[-3:] == [9, 9.5, 10]
    assert len(found.places(dict.fromkeys(range(-50, 50)))) == LONGEST * len(found.grid)  # all diverged


def test_an_own_grid_is_extended_at_the_distance_of_its_last_two_rates():
    found = method(lrs=(1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3))
    assert found.grid == range(6)
    assert [found.lr(place) for place in (-2, -1, 0, 5, 6, 7)] == [1.11e-5, 3.33e-5, 1e-4, 8e-3, 1.6e-2, 3.2e-2]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        (HIGHER, {0: 1.0, 1: 3.0, 2: 2.0}, 1),
        (LOWER, {0: 1.5, 1: 3.0, 2: 1.0}, 2),
        (HIGHER, {0: 3.0, 1: 3.0, 2: 2.0}, 1),  # a tie with the edge: inside
        (HIGHER, {0: 1.0, 1: 3.0, 2: 3.0, 3: 1.0}, 1),  # a tie inside: the smaller
        (LOWER, {0: 2.0, 1: 3.0, 2: 2.0}, 0),  # a tie of the edges: the smaller
        (LOWER, {0: None, 1: 9.0, 2: None}, 1),  # diverged: the worst
        (HIGHER, {0: None, 1: -9.0}, 1),
        (HIGHER, {0: None, 1: None}, None),
    ],
)
def test_the_best_is_inside_if_it_ties_then_the_smaller_and_never_diverged(metric, values, best):
    assert choose(values, metric) == best


def test_a_method_keeps_its_own_values_and_the_common_ones():
    request = RunRequest(find_experiment("digits"), given={"weight_decay": 0.1})
    found = method_of("aida:eps=1e-16:projections=1", request, (), (1,))
    assert found.base.method == "aida-k1"
    assert found.base.hyper["eps"] == 1e-16
    assert found.spec(2, 5).hyper == {**found.base.hyper, "lr": 1e-2}
    assert (found.spec(2, 5).seed, found.spec(2).seed) == (5, 0)
    assert (
        found.spec(0) == request.__class__(request.experiment, ("aida-k1",), {**request.given, "eps": 1e-16}).specs()[0]
    )


@pytest.mark.parametrize("text", ["1e-3", "a,b", "1,2,3,4,5", "0,1,2,3,4,5", "1,2,4,8,16,64", "nan,1,2,3,4,5"])
def test_an_own_grid_that_is_too_small_or_too_wide_is_refused(text):
    with pytest.raises(UsageError, match="--lrs"):
        parse_lrs(text)


def test_an_own_grid_is_sorted_and_may_be_one_three_ten():
    assert parse_lrs("1e-1,3e-2,1e-2,3e-3,1e-3,3e-4") == (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


# --- carried out ---


@pytest.fixture(autouse=True)
def nothing_planned(monkeypatch):
    monkeypatch.setattr("aida_lab.workers.attempt._clean_up", lambda: None)  # takes longer than a run
    tuned_runs.PLANNED.clear()
    tuned_runs.BEGUN.clear()


def carry_out(out: Path, *names: str) -> Protocol:
    protocol = Protocol([method(name) for name in names], Jobs(out, Options(device="cpu"), 1, "tuned_runs:run"))
    protocol.run(lambda event: None, lambda specs: None, Stop())
    return protocol


def said(protocol: Protocol) -> list[tuple]:
    return [(each.name, each.places, each.best, each.mean, len(each.fresh)) for each in protocol.results()]


NAMES = ("adamw", "sgd", "aida-k1", "aida-k2:eps=3e-2")


def test_every_method_is_tuned_with_one_seed_and_repeated_with_fresh_ones(tmp_path):
    found = carry_out(tmp_path, *NAMES)
    assert all(outcome.done for outcome in found.outcomes.values())
    for each in found.results():
        optimum = tuned_runs.OPTIMA[each.method.base.method]
        best = each.method.lr(each.best)
        by_hand = {place: tuned_runs.accuracy(each.method.spec(place)) for place in each.places}
        assert by_hand[each.best] == max(value for value in by_hand.values() if value is not None)
        assert abs(math.log10(best / optimum)) < 0.26  # half a step of the grid
        assert not each.at_the_edge
        assert [run.spec.seed for run in each.fresh] == [1, 2, 3]
        assert all(run.spec.hyper["lr"] == best for run in each.fresh)
        values = [tuned_runs.accuracy(each.method.spec(each.best, seed)) for seed in (1, 2, 3)]
        assert each.mean.mean == pytest.approx(statistics.mean(values))
        assert each.mean.std == pytest.approx(statistics.stdev(values))
    assert len(scan(tmp_path)) == len(tuned_runs.BEGUN) == len(found.specs())
    assert len(found.results()[0].places) == 7 < len(found.results()[1].places)


def test_no_fresh_seed_is_begun_before_the_grids_of_all_methods(tmp_path):
    carry_out(tmp_path, *NAMES)
    seeds = [spec.seed for spec in tuned_runs.BEGUN]
    assert seeds[: 7 * len(NAMES)] == [0] * 7 * len(NAMES)


@pytest.mark.parametrize("at", [2, 9, 22])
def test_a_tuning_that_was_killed_ends_with_the_same_result(tmp_path, at):
    whole = said(carry_out(tmp_path / "whole", "adamw", "sgd"))
    runs = len(tuned_runs.BEGUN)
    tuned_runs.BEGUN.clear()
    tuned_runs.PLANNED[at] = "kill"
    with pytest.raises(KeyboardInterrupt):
        carry_out(tmp_path / "killed", "adamw", "sgd")
    assert said(carry_out(tmp_path / "killed", "adamw", "sgd")) == whole
    assert len(tuned_runs.BEGUN) == runs + 1  # only the killed run began twice
    assert [each.spec for each in scan(tmp_path / "whole")] == [each.spec for each in scan(tmp_path / "killed")]


def test_a_failed_run_stops_its_own_method_alone_and_the_next_call_completes_it(tmp_path):
    tuned_runs.PLANNED[2] = "fail"
    adamw, sgd = carry_out(tmp_path, "adamw", "sgd").results()
    assert (adamw.best, len(adamw.grid), len(adamw.fresh)) == (None, 6, 0)
    assert (sgd.method.lr(sgd.best), len(sgd.fresh)) == (31.6, 3)
    assert said(carry_out(tmp_path, "adamw", "sgd")) == said(carry_out(tmp_path / "whole", "adamw", "sgd"))


def test_a_run_whose_folder_is_damaged_is_no_diverged_run(tmp_path):
    protocol = carry_out(tmp_path, "adamw")
    place = protocol.results()[0].places[1]
    folder = tmp_path / protocol.results()[0].method.spec(place).key
    lines = (folder / "curve.jsonl").read_text().splitlines(keepends=True)
    (folder / "curve.jsonl").write_text("".join(lines[:-1]))
    again = carry_out(tmp_path, "adamw")
    assert place not in again.results()[0].grid
    assert again.outcomes[folder.name].state == "failed"


def test_a_run_of_another_process_is_waited_for(tmp_path):
    tuned_runs.PLANNED[3] = "busy"
    assert said(carry_out(tmp_path, "adamw")) == said(carry_out(tmp_path / "alone", "adamw"))


def test_a_method_that_always_diverges_has_no_best_and_no_fresh_seeds(tmp_path, monkeypatch):
    monkeypatch.setitem(tuned_runs.OPTIMA, "adamw", 1e-30)
    (found,) = carry_out(tmp_path, "adamw").results()
    assert (found.best, found.mean, list(found.fresh)) == (None, None, [])
    assert len(found.places) == len(found.grid) == 14


# --- the command ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("own", None)  # left by another test
    torch.set_num_threads(1)
    return tmp_path


def call(*words: object):
    return CliRunner(env={"COLUMNS": "220", "TERM": "dumb"}).invoke(app, ["tune", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "which experiment? aida tune EXPERIMENT; known are digits, "),
        (("digits", "--seeds", "0-2"), "--seeds 0-2 contains the tuning seed 0"),
        (("digits", "--lrs", "1,2"), "a grid has at least 6 different positive learning rates"),
        (("digits", "--optimizer", "adamw:lr=0"), "adamw has no learning rate to start from"),
        (("digits", "--optimizer", "adamw:epss=1"), "adamw has no hyper-parameter 'epss'"),
        (("digits", "--optimizer", "torch.optim:None"), "cannot be imported"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_one_line_and_starts_nothing(folder, words, line):
    found = call(*words)
    assert found.exit_code == 2, found.output
    assert line in found.output
    assert len(found.output.strip().splitlines()) == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize("refine", [(), ("--refine",)])
def test_the_table_is_what_the_curves_say_and_the_command_repeats_it_without_training(folder, refine):
    words = ("digits", "--optimizer", "adamw", "--optimizer", "aida:eps=1e-4", "--seeds", "1-2", *refine)
    quick = ("--epochs", 1, "--limit", 1, "--device", "cpu")
    found = call(*words, *quick)
    assert found.exit_code == 0, found.output
    assert found.output.strip().endswith("Next: aida report runs")
    table = found.output[found.output.index("digits: test accuracy") :]
    rows = {line.split("  ")[0].strip(): line for line in table.splitlines() if " to " in line}
    for name, optimizer in (("adamw", "adamw"), ("aida-k2 eps=0.0001", "aida")):
        runs = [each for each in scan("runs") if each.spec.optimizer == optimizer]
        curves = {(each.spec.hyper["lr"], each.spec.seed): read_curve(each.path) for each in runs}
        best = {run: max(row["accuracy"] for row in rows) for run, rows in curves.items()}
        grid = sorted(lr for lr, seed in best if seed == 0)
        top = max(best[lr, 0] for lr in grid)
        tied = [lr for lr in grid if best[lr, 0] == top]
        lr = next((each for each in tied if each not in (grid[0], grid[-1])), tied[0])
        assert sorted(seed for rate, seed in best if rate == lr) == [0, 1, 2]
        assert len(best) == len(grid) + 2
        fresh = [best[lr, 1], best[lr, 2]]
        extension = f" + {len(grid) - 7}" if len(grid) > 7 else ""
        row = " ".join(next(line for start, line in rows.items() if start.startswith(name)).split())
        budget = f"{name} 7{extension} + 2 {grid[0]:g} to {grid[-1]:g} {lr:g} "
        assert row.startswith(budget)
        tuned, mean, _, std, n = (float(word.replace("±", "0")) for word in row.removeprefix(budget).split()[:5])
        assert (tuned, mean, n) == (pytest.approx(top, rel=1e-3), pytest.approx(statistics.mean(fresh), rel=1e-3), 2)
        assert std == pytest.approx(statistics.stdev(fresh), rel=0.05)
    before = {each.path: each.changed for each in scan("runs")}
    again = call(*words, *quick)
    assert again.exit_code == 0
    assert again.output[again.output.index("digits: test accuracy") :] == table
    assert {each.path: each.changed for each in scan("runs")} == before


def test_a_tuning_in_which_runs_failed_says_so(folder, monkeypatch):
    Path("own.py").write_text(
        "import torch\n"
        "class Broken(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        raise RuntimeError('this optimizer is broken')\n"
    )
    found = call("digits", "--optimizer", "own:Broken", "--epochs", 1, "--limit", 1, "--device", "cpu")
    assert found.exit_code == 1
    assert "7 of the grid not finished" in found.output
    assert "7 of 7 runs are not finished. Next: the same command again; it resumes them" in found.output
