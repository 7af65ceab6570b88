"""Every number names the commit and the torch version behind it; and what the tests say of the real records."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path

import pytest

from aida_lab.report import formats, tables
from aida_lab.report.build import read, write, write_tables
from aida_lab.report.collect import read_runs
from aida_lab.report.columns import origins
from aida_lab.report.page import payload
from aida_lab.report.verdict import glance
from aida_lab.runs.files import read_regular
from dunnett_by_hand import dunnett_by_hand
from report_fixture import EXPERIMENTS, begin_run, spec, write_run

OLD, NEW = "a" * 40, "b" * 40 + "+"
RESULTS = Path(__file__).parents[1] / "results"


def write_seeds(root, method, *sessions):
    for seed, session in enumerate(sessions):
        write_run(root, spec(method, seed), [80.0, 90.0, 91.0 + seed / 10, 90.9], **session)


@pytest.fixture
def runs(tmp_path):
    """Aida's runs have one commit and torch, Adam's commits differ, SGD's torch differs, AdamW's commit is unknown."""
    root = tmp_path / "runs"
    write_seeds(root, "aida-k2", *[{"git": OLD}] * 3)
    write_seeds(root, "adam", {"git": OLD}, {"git": OLD}, {"git": NEW})
    write_seeds(root, "sgd", {"git": OLD}, {"git": OLD, "versions": {"torch": "2.11"}})
    write_seeds(root, "adamw", {"git": None})
    return root


def comparison_of(root):
    (column,) = read([root], declared=EXPERIMENTS).columns
    return column, tables.comparison(column)


def test_a_cell_that_mixes_commits_or_torch_versions_is_marked(runs):
    column, grid = comparison_of(runs)
    notes = {row[0].text: row[2].note for row in grid.rows}
    assert notes["Aida (K=2)"] == ""
    assert notes["Adam"] == "2 commits"
    assert notes["SGD"] == "2 torch versions"
    assert notes["AdamW"] == ""
    table = next(table for table in read([runs], declared=EXPERIMENTS).paper if table.runs)
    shown = {row[0].text: " ".join(field.text for field in row) for row in tables.overview(table).rows}
    assert "n=3, 2 commits" in shown["Adam"]
    assert "commits" not in shown["Aida (K=2)"]
    assert column.mixed == "3 commits, 2 torch versions"


def test_a_column_names_its_commits_and_torch_versions_with_their_runs(runs, tmp_path):
    said = (
        "Mixes 3 commits, 2 torch versions. Commit: aaaaaaa (7 runs), bbbbbbb+ (1 run), not recorded (1 run). "
        "torch: 2.13 (8 runs), 2.11 (1 run)."
    )
    assert said in comparison_of(runs)[1].remarks
    results = read([runs], declared=EXPERIMENTS)
    write_tables(results, tmp_path / "tables")
    for name in ("table-III.md", "table-III.tex"):
        assert said in (tmp_path / "tables" / name).read_text()
    page = write(results, tmp_path / "out").page.read_text()
    assert said in page
    assert '<span class="badge">3 commits, 2 torch versions</span>' in page


def test_a_column_of_one_commit_is_not_marked(tmp_path):
    write_seeds(tmp_path, "aida-k2", *[{"git": OLD}] * 2)
    column, grid = comparison_of(tmp_path)
    assert column.mixed == ""
    assert "Commit: aaaaaaa. torch: 2.13." in grid.remarks


def test_only_runs_behind_a_number_of_the_table_mix_it(tmp_path):
    write_seeds(tmp_path, "aida-k2", *[{"git": OLD}] * 2)
    begin_run(tmp_path, spec("aida-k2", 7), [50.0], git=NEW)  # not finished
    write_run(tmp_path, spec("adam", 0, {"eps": 1e-4}), [90.0] * 4, git=NEW)  # not the configuration that is shown
    write_seeds(tmp_path, "adam", *[{"git": OLD}] * 2)
    assert comparison_of(tmp_path)[0].mixed == ""


def test_every_run_names_its_commit_and_torch_version(runs, tmp_path):
    results = read([runs], declared=EXPERIMENTS)
    rows = {
        (row["method"], row["seed"]): row
        for row in csv.DictReader(formats.runs_csv(results.collection.runs).splitlines())
    }
    assert (rows["adam", "2"]["commits"], rows["adam", "2"]["torch"]) == (NEW, "2.13")
    assert (rows["sgd", "1"]["commits"], rows["sgd", "1"]["torch"]) == (OLD, "2.11")
    assert rows["adamw", "0"]["commits"] == "not recorded"
    shown = {(run["commit"], run["torch"]) for run in payload(results, tmp_path)["runs"]}
    assert shown == {("aaaaaaa", "2.13"), ("bbbbbbb+", "2.13"), ("aaaaaaa", "2.11"), ("not recorded", "2.13")}
    cells = {row["method"]: row for row in csv.DictReader(formats.cells_csv(results.columns).splitlines())}
    assert (cells["adam"]["commits"], cells["sgd"]["torch"]) == (f"{OLD}; {NEW}", "2.11; 2.13")


def test_a_run_that_was_resumed_by_other_code_names_both(tmp_path):
    folder = write_run(tmp_path, spec("adam", 0), [90.0] * 4, git=OLD)
    sessions = json.loads((folder / "env.json").read_text())["sessions"]
    sessions += [{**sessions[0], "git": NEW}, {**sessions[0], "versions": "lost"}]
    (folder / "env.json").write_text(json.dumps({"sessions": sessions}))
    (run,) = read_runs([tmp_path], EXPERIMENTS).runs
    assert run.commits == (OLD, NEW)
    assert run.torch == ("2.13", "not recorded")
    assert "Mixes 2 commits, 2 torch versions." in comparison_of(tmp_path)[1].remarks[-1]


# --- the records of this repository ---


@pytest.fixture(scope="module")
def records():
    if not RESULTS.is_dir():
        pytest.skip("results/ is not part of this checkout")
    return read([RESULTS])


def numbers(name):
    """By method, the best accuracies of its most repeated configuration, of several the one with the best mean. Read
    without the report: full runs of 200 epochs."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    files: dict[str, bytes] = {}
    for archive in RESULTS.glob("*.tar.xz"):
        with tarfile.open(archive) as tar:
            files |= {entry.name: tar.extractfile(entry).read() for entry in tar}
    specs = {name.split("/")[0]: json.loads(files[name]) for name in files if name.endswith("spec.json")}
    # a run that measured stepsizes counts only if its seed was not trained without
    for key, wanted in sorted(specs.items(), key=lambda item: -item[1].get("probe_every", 0)):
        if wanted["experiment"] == name and wanted["epochs"] == 200:
            hyper = wanted["hyper"]
            method = wanted["optimizer"] + (f"-k{hyper['projections']}" if "projections" in hyper else "")
            best = json.loads(files[f"{key}/result.json"])["best"]
            found.setdefault(method, {}).setdefault(json.dumps(hyper), {})[wanted["seed"]] = best
    best = {m: max((list(each.values()) for each in tried.values()), key=_rank) for m, tried in found.items()}
    return {method: values for method, values in best.items() if len(values) > 1}


def _rank(values):
    return len(values), sum(values) / len(values)


@pytest.mark.parametrize(
    ("name", "alike"),
    [("vgg11-cifar10", {"aida-k1", "sgd", "adabelief"}), ("vgg11-cifar100", {"aida-k1"})],
)
def test_the_tests_on_cifar_are_those_of_an_independent_computation(records, name, alike):
    own = numbers(name)
    control = own.pop("aida-k2")
    column = next(each for each in records.comparable if each.name == name)
    tests = {cell.method: cell.against_reference["best"] for cell in column.cells if cell.against_reference}
    tested = {method: each for method, each in tests.items() if each.p is not None}
    assert tested.keys() == own.keys()
    freedom = sum(len(values) - 1 for values in (control, *own.values()))
    for (method, values), p in zip(own.items(), dunnett_by_hand(control, list(own.values())), strict=True):
        assert tested[method].freedom == freedom
        assert tested[method].p == pytest.approx(p, abs=2e-4), (method, values)
    # docs/reproduce.md and README.md name them
    assert {method for method, each in tested.items() if not each.significant} == alike
    (row,) = [row for row in glance(records).rows if row[0].text == column.title]
    assert row[3].text == f"{len(own) - len(alike)} of {len(tests)}"


def test_the_records_commits_are_those_of_their_environments(records):
    mixed = 0
    for cell in (cell for column in records.columns for cell in column.cells if cell.chosen):
        sessions = [
            session
            for run in cell.chosen.counted
            for session in json.loads(read_regular(run.folder / "env.json"))["sessions"]
        ]
        commits, versions = origins(cell.chosen.counted)
        assert set(commits) == {session["git"] for session in sessions}
        assert set(versions) == {session["versions"]["torch"] for session in sessions}
        mixed += len(commits) > 1
    assert mixed
