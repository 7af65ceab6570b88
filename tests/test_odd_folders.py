"""One bad folder never hides the others: every command reads what it can, says what it left out, and ends well."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing
from typer.testing import CliRunner

import aida_lab.report.build as build
from aida_lab.cli import app
from aida_lab.progress.frame import frame
from aida_lab.progress.watched import Watcher
from aida_lab.runs.files import read_archive
from aida_lab.runs.records import scan
from odd_folders import CASES, FILES, SECRET, Case, make
from report_fixture import spec, write_run, write_stepsizes

GOOD = spec("sgd", 123, experiment="digits", epochs=3)


@pytest.fixture(scope="module", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """Typer builds them for each call, which takes five times as long as a call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        yield


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A command that hangs, on a pipe or on the zeros of a device, fails its test instead."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def aida(*words: str | Path, seconds: float = 20, code: int = 0) -> Any:
    with within(seconds), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font without a glyph
        found = CliRunner(env={"COLUMNS": "300"}).invoke(app, [os.fspath(word) for word in words])
    assert found.exception is None or isinstance(found.exception, SystemExit), repr(found.exception)
    assert found.exit_code == code, found.output
    assert "Traceback" not in found.output
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", found.output)
    return found


def all_text(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_there_are_enough_kinds():
    assert len({case.name for case in CASES}) == len(CASES) >= 100


def done(runs: Path) -> list[str]:
    return [record.path.name for record in scan(runs) if record.state in ("finished", "diverged")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_odd_folder_alone(tmp_path: Path, case: Case):
    runs, out = tmp_path / "in" / "runs", tmp_path / "out"
    make(case, runs, 0)
    before = tree(tmp_path / "in")
    listed = aida("runs", runs)
    assert "1 runs in" in listed.output
    assert (case.said or "finished") in listed.output.replace("\n", " ")
    (folder,) = runs.iterdir()
    readable = case.stepsizes == ""
    said = aida("stepsizes", folder, "--out", out / "stepsizes", code=0 if readable else 2)
    if not readable:
        assert re.fullmatch(r"[^\n]*\n", said.stderr), "one line"
        assert (case.stepsizes or "is not there") in said.stderr
    said = aida("collect", runs, "--out", out / "results")
    assert done(out / "results") == done(runs)
    packed = [each for path in (out / "results").iterdir() for each in read_archive(path).values()]
    assert SECRET.encode() not in b"".join(packed)
    assert done(runs) or re.fullmatch(r"left out: .*\n", said.stderr)
    assert SECRET not in all_text(out)
    assert tree(tmp_path / "in") == before, "the folders were only read"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


#: A report takes as long for a dozen folders as for one.
GROUPS = [CASES[start : start + 12] for start in range(0, len(CASES), 12)]


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_a_report_of_a_few_odd_folders(tmp_path: Path, group: int, monkeypatch):
    # figures of runs that count are drawn below, for all of them at once
    monkeypatch.setattr(build, "draw_all", lambda results, folder: [])
    runs, out = tmp_path / "in" / "runs", tmp_path / "out"
    for seed, case in enumerate(GROUPS[group]):
        make(case, runs, seed)
    write_run(runs, GOOD, [90.0, 92.0, 93.0])
    before = tree(tmp_path / "in")
    found = aida("report", runs, "--out", out)
    aida("runs", runs, "--json")
    for case in GROUPS[group]:
        assert case.said in found.stderr or case.said in ("stopped", "failed", "owned", "diverged")
    assert SECRET not in all_text(out)
    assert GOOD.key in (out / "tables" / "runs.csv").read_text()
    assert tree(tmp_path / "in") == before, "the folders were only read"


@pytest.fixture(scope="module")
def every(tmp_path_factory) -> Path:
    """All cases in one folder, and one good run."""
    root = tmp_path_factory.mktemp("odd") / "runs"
    for seed, case in enumerate(CASES):
        make(case, root, seed)
    write_stepsizes(write_run(root, GOOD, [90.0, 92.0, 93.0]), "sgd")
    return root


def test_runs_lists_them_all(every: Path):
    found = aida("runs", every)
    assert f"{len(list(every.iterdir()))} runs in" in found.output
    assert re.search(rf"{GOOD.key}\W+digits.*finished.*93.00 \(3\)", found.output)


def test_watch_shows_each_as_far_as_it_can_be_read(every: Path):
    for folder in every.iterdir():
        shown = "".join(line.plain for line in frame(Watcher([folder]).look(), 80))
        assert shown
        assert SECRET not in shown
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", shown), folder
    assert "accuracy 93.00" in aida("watch", every / GOOD.key, "--once").output
    assert re.match(r"20 of \d{3} runs", aida("watch", every, "--once").output)


def test_collect_takes_the_good_ones(every: Path, tmp_path: Path):
    found = aida("collect", every, "--out", tmp_path / "results")
    assert {record.state for record in scan(tmp_path / "results")} == {"finished", "diverged"}
    assert GOOD.key in {record.path.name for record in scan(tmp_path / "results")}
    said = [line for line in found.stderr.splitlines() if "is not copied: " not in line]
    assert len(said) == sum(record.state not in ("finished", "diverged") for record in scan(every))
    for archive in (tmp_path / "results").iterdir():
        packed = read_archive(archive)
        assert {Path(name).name for name in packed} <= set(FILES)
        assert SECRET.encode() not in b"".join(packed.values())


def test_report_shows_the_good_ones_and_lists_the_others(every: Path, tmp_path: Path):
    found = aida("report", every, "--out", tmp_path / "in" / "report", seconds=300)
    made = tmp_path / "in" / "report"
    text = all_text(made)
    assert SECRET not in text
    assert GOOD.key in (made / "tables" / "runs.csv").read_text()
    skipped = [record for record in scan(every) if record.state == "damaged"]
    for record in skipped:
        assert record.problem in found.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"], "nothing lands outside"
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["report"]
    for path in made.rglob("*"):
        assert re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9._-]*", path.name), path


def test_stepsizes_draws_the_good_ones(every: Path, tmp_path: Path):
    folders = [every / GOOD.key, *(path for path in every.iterdir() if os.path.lexists(path / "stepsizes.jsonl"))][:30]
    found = aida("stepsizes", *folders, "--out", tmp_path / "out", seconds=120)
    assert (tmp_path / "out" / "stepsizes.png").stat().st_size > 10_000
    assert found.stderr.count("left out: ") >= 10
