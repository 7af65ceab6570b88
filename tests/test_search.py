"""A search by one worker: it measures every configuration once, repeats the best one and handles failures."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from optuna.trial import TrialState
from typer.testing import CliRunner

import search_cases
from aida_lab.cli import app
from aida_lab.events import Event
from aida_lab.runs.records import read_run, scan
from aida_lab.runs.store import RunFolder
from aida_lab.search.findings import Measured
from aida_lab.search.storage import missing_packages, sqlite_in
from aida_lab.search.trials import ENDED, MEASURED, RUN
from aida_lab.spec import Metric
from search_cases import complete, new_storage, once, plan, trials, worker


@pytest.fixture
def address(tmp_path):
    return new_storage(tmp_path)


def findings(made, out, address, runner="search_cases:run"):
    """Carry out a search with one worker; return its findings and the worker."""
    with worker([made], out, address) as ours:
        ours.carry_out(runner)
        return ours.searches[0].findings(), ours


LR = {"lr": (1.0, 0.1, 0.01)}


def test_every_configuration_is_measured_once_and_the_best_repeated(tmp_path, address):
    made = plan(over=LR)
    found, ours = findings(made, tmp_path, address)
    assert complete(trials(address, made.name)) == once(made.space.grid())
    assert found.complete
    assert found.best.params == {"lr": 0.1}
    assert [row.spec for row in found.repetitions] == [made.repetition(found.best.spec, seed) for seed in (0, 1)]
    assert (found.spread("best").mean, found.spread("best").n) == (pytest.approx(91.05), 2)
    assert found.spread("best").std == pytest.approx(0.1 / 2**0.5)
    # trials name ordinary runs; a repetition that was a search run is not trained again
    runs = {record.path.name: record for record in scan(tmp_path)}
    assert set(runs) == {trial.user_attrs[RUN] for trial in trials(address)}
    assert len(runs) == 3 + 1 == len([event for event in ours.events if event.kind == "started"])
    assert {record.state for record in runs.values()} == {"finished"}


def test_the_same_search_again_trains_nothing(tmp_path, address):
    made = plan(over=LR)
    findings(made, tmp_path, address)
    before = trials(address)
    again, ours = findings(made, tmp_path, address)
    assert again.complete
    assert {event.kind for event in ours.events} == {"skipped"}
    assert trials(address) == before


def test_more_seeds_add_repetitions(tmp_path, address):
    findings(plan(over=LR), tmp_path, address)
    found, ours = findings(plan(over=LR, seeds=(0, 1, 2, 3)), tmp_path, address)
    assert found.spread("best").n == 4
    assert len([event for event in ours.events if event.kind == "started"]) == 2


def test_other_seeds_share_the_study_of_the_repetitions(tmp_path, address):
    findings(plan(over=LR, seeds=(2, 3)), tmp_path, address)
    found, ours = findings(plan(over=LR, seeds=(0, 1)), tmp_path, address)
    assert found.complete
    assert [row.spec.seed for row in found.repetitions] == [0, 1]
    assert len([event for event in ours.events if event.kind == "started"]) == 1  # seed 0 was a search run


def test_a_repetition_that_was_a_search_run_on_another_machine_is_not_trained_again(tmp_path, address):
    findings(plan(over=LR, seeds=(1,)), tmp_path / "one", address)
    found, ours = findings(plan(over=LR, seeds=(0, 1)), tmp_path / "two", address)
    assert found.complete
    assert {event.kind for event in ours.events} == {"skipped"}
    assert [Path(row.measured.folder).parent for row in found.repetitions] == [tmp_path / "one"] * 2
    assert not scan(tmp_path / "two")


def test_a_run_that_was_trained_before_is_not_trained_again(tmp_path, address):
    made = plan(over=LR)
    findings(made, tmp_path, f"sqlite:///{tmp_path / 'other.db'}")
    found, ours = findings(made, tmp_path, address)
    assert found.complete
    assert {event.kind for event in ours.events} == {"skipped"}


def test_a_diverged_configuration_is_the_worst(tmp_path, address):
    found, _ = findings(plan(over={"lr": (10.0, 1e-4)}), tmp_path, address)
    assert [row.state for row in found.rows] == ["diverged", "finished"]
    assert found.rows[0].measured.best > found.rows[1].measured.best
    assert found.best.params == {"lr": 1e-4}


def test_if_all_diverge_nothing_is_repeated(tmp_path, address):
    found, _ = findings(plan(over={"lr": (10.0, 100.0)}), tmp_path, address)
    assert (found.best, found.complete, list(found.repetitions)) == (None, False, [])


def test_a_failed_run_is_left_to_other_workers_and_no_best_is_chosen(tmp_path, address):
    made = plan(over={"lr": (2.0, 0.1)})
    found, ours = findings(made, tmp_path, address)
    assert [row.state for row in found.rows] == ["failed", "finished"]
    assert (found.best, found.complete) == (None, False)
    assert found.problems() == [f"{made.spec({'lr': 2.0}).key} failed: ValueError: lr 2 fails"]
    assert len([event for event in ours.events if event.kind == "failed"]) == 1
    # the next worker retries it
    _, other = findings(made, tmp_path, address)
    assert len([event for event in other.events if event.kind == "failed"]) == 1


def test_a_second_ctrl_c_releases_leases(tmp_path, address):
    with worker([plan(over=LR)], tmp_path, address) as ours:
        with pytest.raises(KeyboardInterrupt):
            ours.carry_out("search_cases:interrupted_again")
        (left,) = trials(address)
        assert (left.state, left.user_attrs[ENDED]) == (TrialState.FAIL, "stopped")


def test_a_run_that_another_process_trains_is_waited_for(tmp_path, address, monkeypatch):
    made = plan(over={"lr": (0.1, 0.01)}, seeds=(0,))
    held = RunFolder.open(tmp_path, made.spec({"lr": 0.1}))
    monkeypatch.setattr("aida_lab.search.loop._POLL", 0.01)
    notes = []

    def release_on_note(event: Event) -> None:
        if event.kind == "note":
            notes.append(event.text)
            held.close()

    with worker([made], tmp_path, address) as ours:
        ours.listen = release_on_note
        ours.carry_out()
        assert ours.searches[0].findings().complete
    assert notes == ["other workers train the rest; waiting for them"]
    assert all(trial.state == TrialState.COMPLETE for trial in trials(address))


def test_several_searches_share_one_queue(tmp_path, address):
    plans = [plan(over=LR, seeds=(0,)), plan("adam", LR, seeds=(0,))]
    with worker(plans, tmp_path, address) as ours:
        ours.carry_out("search_cases:run", jobs=2)
        assert all(search.findings().complete for search in ours.searches)
    for made in plans:
        assert complete(trials(address, made.name)) == once(made.space.grid())
    started = [event.run for event in ours.events if event.kind == "started"]
    assert len(started) == len(set(started)) == 2 * 3
    assert {spec.key for spec in ours.expected} >= set(started)


def test_runs_are_compared_by_the_best_or_the_last_epoch():
    first = Measured("a", "finished", best=95.0, best_epoch=1, last=80.0, folder="", host="")
    second = Measured("b", "finished", best=94.0, best_epoch=1, last=90.0, folder="", host="")
    lost = Measured("c", "diverged", best=99.0, best_epoch=1, last=None, folder="", host="")
    accuracy, loss = Metric("accuracy", "", "higher"), Metric("loss", "", "lower")
    assert first.value("best", accuracy) > second.value("best", accuracy) > lost.value("best", accuracy)
    assert first.value("last", accuracy) < second.value("last", accuracy)
    assert lost.value("best", loss) > first.value("best", loss)
    assert Measured(**json.loads(json.dumps(asdict(first)))) == first


def test_tpe_tries_values_between_the_ends(tmp_path, address):
    made = plan(over={"lr": (1.0, 1e-3)}, sampler="tpe", trials=12, seeds=(0,))
    found, _ = findings(made, tmp_path, address)
    rates = [row.params["lr"] for row in found.rows]
    assert len(set(rates)) == 12
    assert all(1e-3 <= rate <= 1 for rate in rates)
    assert not set(rates) & {1.0, 1e-3}
    assert complete(trials(address, made.name)) == once([dict(row.params) for row in found.rows])
    assert abs(found.best.params["lr"] - 0.1) == min(abs(rate - 0.1) for rate in rates)
    again, ours = findings(plan(over=made.space.sets, sampler="tpe", trials=13, seeds=(0,)), tmp_path, address)
    assert [row.params["lr"] for row in again.rows][:12] == rates
    assert len([event for event in ours.events if event.kind == "started"]) <= 2


def test_a_search_by_tpe_is_deterministic(tmp_path):
    made = plan(over={"lr": (1.0, 1e-3)}, sampler="tpe", trials=11, seeds=(0,))
    rates = []
    for name in ("a", "b"):
        found, _ = findings(made, tmp_path / name, sqlite_in(tmp_path / name))
        rates.append([row.params["lr"] for row in found.rows])
    assert rates[0] == rates[1]


def test_the_median_pruner_stops_worse_runs(tmp_path, address):
    made = plan(over={"lr": (0.1, 0.2, 0.05, 0.08, 0.12, 1e-5, 0.09)}, epochs=8, pruner="median", seeds=(0,))
    found, _ = findings(made, tmp_path, address)
    assert [row.state for row in found.rows] == ["finished"] * 5 + ["pruned", "finished"]
    assert found.complete
    folder = tmp_path / found.rows[5].spec.key
    assert read_run(folder).state == "stopped"
    # in the first epoch after the first quarter
    assert read_run(folder).rows == found.rows[5].measured.best_epoch == 3
    assert [trial.state for trial in trials(address, made.name)].count(TrialState.PRUNED) == 1
    assert not (folder / "checkpoints").exists()
    # a pruned run can be trained later
    assert search_cases.run(found.rows[5].spec, tmp_path, None, lambda event: None)["state"] == "finished"


QUICK = ("--limit", "2", "--epochs", "1", "--repeat-epochs", "1", "--device", "cpu", "--out", "runs")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("own", None)  # left by another test
    torch.set_num_threads(1)
    return tmp_path


def call(*words: object):
    return CliRunner(env={"COLUMNS": "220", "TERM": "dumb"}).invoke(app, ["search", *map(str, words)])


def test_the_command_trains_and_prints_and_writes_its_findings(folder):
    words = ("--over", "eps=1e-8,1e-2", "--seeds", "0,1", "--warmup", "3")
    found = call("digits", "--optimizer", "adam", *words, *QUICK)
    assert found.exit_code == 0, found.output
    (path,) = (folder / "runs" / "search").glob("*.json")
    written = json.loads(path.read_text())
    assert f"wrote runs/search/{path.name}" in found.output
    assert written["complete"]
    assert (written["search_epochs"], written["repetition_epochs"], written["shortened"]) == (1, 1, False)
    assert [each["values"] for each in written["configurations"]] == [{"eps": 1e-8}, {"eps": 1e-2}]
    (winner,) = [each for each in written["configurations"] if each["winner"]]
    assert winner["best"] == max(each["best"] for each in written["configurations"])
    (marked,) = [line for line in found.output.splitlines() if line.lstrip().startswith("*")]
    assert winner["folder"] in marked
    assert [each["seed"] for each in written["repetitions"]] == [0, 1]
    assert written["repetitions"][0]["run"] == winner["run"]
    values = [each["best"] for each in written["repetitions"]]
    assert written["repeated"]["best"]["mean"] == pytest.approx(sum(values) / 2)
    assert "(n = 2)" in found.output
    assert {record.state for record in scan("runs")} == {"finished"}
    assert len(scan("runs")) == 3
    for record in scan("runs"):
        assert (record.spec.limit, record.spec.warmup) == (2, 3)


def test_all_methods_of_a_table_and_a_shortened_search(folder, monkeypatch):
    monkeypatch.setattr("aida_lab.search.space.methods_of", lambda experiment: ("aida-k1", "sgd"))
    words = ("digits", "--all", "--seeds", "0", "--limit", 1, "--epochs", 1, "--repeat-epochs", 2)
    found = call(*words, "--over", "lr=0.01,0.02")
    assert found.exit_code == 0, found.output
    written = [json.loads(path.read_text()) for path in sorted((folder / "runs" / "search").glob("*.json"))]
    assert [each["method"] for each in written] == ["aida-k1", "sgd"]
    assert all(each["shortened"] and each["spec"]["epochs"] == 1 for each in written)
    assert found.output.count("search shortened to 1 of 2 epochs") == 2
    assert "2 of 40 epochs, at most 1 batches per epoch; searched with 1 epochs" in " ".join(found.output.split())
    assert {record.spec.epochs for record in scan("runs")} == {1, 2}


def test_if_the_best_diverges_at_full_length_the_next_best_is_named(folder, monkeypatch):
    monkeypatch.setattr("aida_lab.training.run.run", search_cases.run)
    words = ("digits", "--optimizer", "sgd", "--epochs", 2, "--repeat-epochs", 4, "--over")
    found = call(*words, "lr=0.003,0.3,0.01")
    assert found.exit_code == 0, found.output
    assert found.output.count("diverged") == 3
    assert "--set lr=0.01 repeats the next best instead" in found.output
    assert "instead" not in call(*words, "lr=0.003,0.01").output


def test_a_set_of_one_configuration_is_not_searched_by_a_shortened_run(folder):
    words = ("digits", "--optimizer", "sgd", "--seeds", "0-1", "--limit", 1, "--epochs", 1, "--repeat-epochs", 2)
    found = call(*words)
    assert found.exit_code == 0, found.output
    assert "shortened" not in found.output
    assert sorted((record.spec.epochs, record.spec.seed) for record in scan("runs")) == [(2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which experiment?"),
        (["digit"], "did you mean 'digits'"),
        (["digits", "--optimizer", "adm"], "did you mean 'adam'"),
        (["digits", "--all", "--optimizer", "adam"], "use one of the two"),
        (["digits", "--over", "epsilon=1,2"], "did you mean 'eps'"),
        (["digits", "--over", "lr=1,2", "--set", "lr=1"], "both name lr"),
        (["digits", "--over", "lr=()"], "the set is empty"),
        (["digits", "--by", "mean"], "--by 'mean' is not known; known: best, last"),
        (["digits", "--sampler", "cma"], "--sampler 'cma' is not known; known: grid, tpe"),
        (["digits", "--sampler", "tpe"], "needs a range of numbers"),
        (["digits", "--pruner", "asha"], "--pruner 'asha' is not known; known: none, median"),
        (["digits", "--seeds", "x"], "is not a seed"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(folder, words, said):
    found = call(*words)
    assert found.exit_code == 2
    assert said in found.output
    assert len(found.output.strip().splitlines()) == 1
    assert not (folder / "runs").exists()


def test_an_output_path_that_is_no_folder_is_refused_in_one_line(folder):
    (folder / "taken").write_text("")
    found = call("digits", "--optimizer", "sgd", *QUICK, "--out", "taken")
    assert (found.exit_code, found.output.count("\n")) == (2, 1)
    assert "cannot write to taken: Not a directory; choose another folder with --out" in found.output


def test_a_failing_configuration_ends_the_command_with_an_error(folder):
    (folder / "own.py").write_text(
        "import torch\n"
        "class Broken(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        raise RuntimeError('this optimizer is broken')\n"
    )
    found = call("digits", "--optimizer", "own:Broken", "--over", "lr=0.1", *QUICK)
    assert found.exit_code == 1
    assert "this optimizer is broken" in found.output
    assert "no best configuration of own:Broken: of 1 configurations 1 not measured yet" in found.output


def test_without_optuna_the_command_says_how_to_install_it(folder, monkeypatch):
    monkeypatch.setattr("aida_lab.search.storage.find_spec", lambda name: None)
    found = call("digits")
    assert found.exit_code == 2
    assert found.output.strip() == "aida search needs Optuna: pip install '.[search]' in a clone"
    assert missing_packages("postgresql://host/db") == (
        "aida search needs Optuna and psycopg: pip install '.[search]' in a clone"
    )


def test_a_trial_stores_the_result_of_its_run(tmp_path, address):
    made = plan(over=LR, seeds=(0,))
    found, _ = findings(made, tmp_path, address)
    kept = {trial.user_attrs[RUN]: trial for trial in trials(address, made.name)}
    for row in found.rows:
        trial = kept[row.spec.key]
        assert Measured(**trial.user_attrs[MEASURED]) == row.measured
        assert trial.value == row.measured.best
        assert trial.params == row.params
