"""The command line as a newcomer meets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from aida._version import __version__
from aida.catalog import catalog, find
from aida.stepsizes import StepsizeProbe
from aida.stepsizes.sinks import JsonLines
from aida_lab.cli import app
from aida_lab.external import Rival
from aida_lab.runs.records import scan


def call(*words: object):
    # wide enough that no sentence the tests look for is broken over two lines
    return CliRunner(env={"COLUMNS": "220", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


@pytest.fixture
def run(tmp_path):
    p = nn.Parameter(torch.ones(4, 3))
    p.grad = torch.randn(4, 3)
    optimizer = find("aida").build([p])
    with JsonLines(tmp_path / "run" / "stepsizes.jsonl") as sink:
        StepsizeProbe(optimizer, [("p", p)], every=1, sink=sink)
        for _ in range(3):
            optimizer.step()
    return tmp_path / "run"


@pytest.mark.parametrize("command", [(), ("list",), ("theory",), ("stepsizes",)])
def test_help_explains_itself(command):
    found = call(*command, "--help")
    assert found.exit_code == 0
    assert "Usage" in found.output
    if not command:
        for name in ("list", "theory", "stepsizes"):
            assert name in found.output


def test_no_arguments_show_the_help():
    assert "Usage" in call().output


def test_version_is_the_packages():
    assert call("--version").output.strip() == __version__


def test_list_shows_every_optimizer_with_its_rule():
    found = call("list")
    assert found.exit_code == 0
    for entry in catalog().values():
        assert entry.name in found.output
        assert entry.title in found.output


def test_list_names_rivals_of_other_packages_and_says_which_are_missing(monkeypatch):
    monkeypatch.setattr(
        "aida_lab.external.RIVALS", (Rival("no_such:Class", "Own", "", ""), Rival("torch:X", "X", "", ""))
    )
    lines = [" ".join(line.split()) for line in call("list").output.splitlines()]
    assert "│ no_such:Class │ Own (not installed) │ │ │" in lines
    assert "│ torch:X │ X │ │ │" in lines


@pytest.mark.parametrize("name", list(catalog()))
def test_list_describes_each_in_full(name):
    found = call("list", name)
    assert found.exit_code == 0
    assert find(name).paper.authors.split(",")[0] in found.output
    assert "defaults" in found.output


def test_list_says_what_is_fixed_and_what_is_searched():
    lines = [" ".join(line.split()) for line in call("list", "yogi").output.splitlines()]
    (tuned,) = [index for index, line in enumerate(lines) if line.startswith("│ lstm1-ptb │")]
    assert lines[tuned] == "│ lstm1-ptb │ betas (0.9, 0.999), weight_decay 1.2e-06 │"
    assert lines[tuned + 1] == "│ lstm2-ptb │ searched: lr 0.01, 0.001 │"  # the same for all three: they share a block
    assert lines[tuned + 2] == "│ lstm3-ptb │ searched: eps 0.01, 0.001, 0.0001, 1e-05 │"


def test_an_unknown_optimizer_gets_the_known_names():
    found = call("list", "adambelief")
    assert found.exit_code == 2
    assert "did you mean 'adabelief'" in found.output
    assert all(name in found.output for name in catalog())


@pytest.mark.parametrize(
    ("words", "meant"), [(("lst",), "list"), (("stepsize",), "stepsizes"), (("data", "lst"), "list")]
)
def test_a_misspelled_command_gets_the_one_that_was_meant(words, meant):
    found = call(*words)
    assert found.exit_code == 2
    assert f"No such command {words[-1]!r}. Did you mean {meant!r}?" in found.output


def test_stepsizes_draws_a_folder_and_a_file_side_by_side(run, tmp_path):
    found = call("stepsizes", run, run / "stepsizes.jsonl", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    for name in ("stepsizes.png", "stepsizes.svg"):
        assert (tmp_path / "out" / name).stat().st_size > 5000
        assert name in found.output
    assert "Aida" in found.output


def test_stepsizes_of_a_run_that_diverged_are_shown(run, tmp_path):
    text = re.sub(r'"spread": [0-9.e+-]+', '"spread": null', (run / "stepsizes.jsonl").read_text())
    (tmp_path / "a.jsonl").write_text(text)
    found = call("stepsizes", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "inf" in found.output


def test_a_missing_run_gets_the_runs_that_are_there(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = call("stepsizes", "nothing")
    assert found.exit_code == 2
    assert "no stepsizes at nothing" in found.output
    assert "runs below this folder: run" in found.output


def test_a_file_of_something_else_is_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("hello\n")
    found = call("stepsizes", tmp_path / "a.jsonl")
    assert found.exit_code == 2
    assert "holds no stepsize record" in found.output


@pytest.fixture
def trained(tmp_path):
    """A folder with runs of two methods and two seeds that recorded stepsizes, and one that did not."""
    words = ("train", "digits", "--epochs", "1", "--limit", "2", "--device", "cpu", "--out", tmp_path / "runs")
    assert call(*words, "--optimizer", "aida", "--optimizer", "adam", "--seeds", "0,1", "--probe").exit_code == 0
    assert call(*words, "--optimizer", "sgd").exit_code == 0
    return tmp_path / "runs"


def test_stepsizes_of_a_folder_of_runs_show_the_lowest_seed_of_each_method(trained, tmp_path):
    found = call("stepsizes", trained, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    shown = {each.spec.method: each.path.name in found.output for each in scan(trained) if each.spec.seed == 0}
    assert shown == {"aida-k2": True, "adam": True, "sgd": False}
    assert "shows 2 of 4 runs" in found.output
    assert (tmp_path / "out" / "stepsizes.png").stat().st_size > 5000


def test_stepsizes_of_a_folder_without_any_name_the_option_that_records_them(tmp_path):
    found = call("stepsizes", tmp_path, "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert found.output.count("\n") == 1
    assert "aida train --probe" in found.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("train", "digits"),
        ("search", "digits"),
        ("report", "."),
        ("collect", "."),
        ("stepsizes", "."),
        ("theory",),
        ("demo",),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("out", ["file", "file/below", "dangling"])
def test_an_unwritable_out_is_one_line_before_anything_starts(words, out, tmp_path, monkeypatch):
    if words[0] == "search":
        pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    before = sorted(tmp_path.rglob("*"))
    found = call(*words, "--out", out)
    assert (found.exit_code, found.output.count("\n")) == (2, 1), found.output
    assert found.output.startswith(f"cannot write to {out}: ")
    assert found.output.endswith("; choose another folder with --out\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_theory_writes_its_table_and_figure(tmp_path):
    found = call("theory", "--steps", "20", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "Theorem 1 as printed" in found.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["theory.md", "theory.png", "theory.svg"]


@pytest.mark.parametrize(
    ("missing", "words", "line"),
    [
        ("typer", ["list"], "the command line needs typer and rich: pip install '.[lab]' in a clone"),
        ("rich", ["list"], "this command needs rich: pip install '.[lab]' in a clone"),
        ("sklearn", ["theory"], "this command needs sklearn: pip install '.[lab]' in a clone"),
    ],
)
def test_without_the_extra_a_command_says_so_in_one_line(missing, words, line):
    block = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['aida', *{words!r}]"
    code = f"{block}; from aida_lab.cli import main; main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.strip() == line


def test_help_and_version_import_neither_torch_nor_the_lab():
    code = """
import sys
from aida_lab.cli import app
from typer.main import get_command
from typer.testing import CliRunner
names = list(get_command(app).commands)
assert "train" in names
for words in ([], ["--help"], ["--version"], ["lst"], *([name, "--help"] for name in names)):
    CliRunner().invoke(app, words)
    for heavy in ("torch", "numpy", "scipy", "matplotlib", "sklearn", "aida"):
        assert heavy not in sys.modules, (words, heavy)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_takes_less_than_half_a_second_of_cpu_time():
    command = [sys.executable, "-m", "aida_lab", "--help"]

    def measured() -> float:
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(measured() for _ in range(3)) < 0.5
