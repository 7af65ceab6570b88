"""A report in its folder: whole whenever it is killed, nothing stale, nobody else's files touched."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import aida_lab.report.build as build
from aida_lab.cli import app
from aida_lab.report.build import read, write
from aida_lab.report.collect import read_runs
from aida_lab.report.publish import LIST, publishing
from aida_lab.runs.files import StoreError
from report_fixture import EXPERIMENTS, spec, write_run, write_stepsizes

MARK = "</html>"


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def put(folder: Path, *names: str, text: str = "new") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# --- killed


def publish_for_ever(out: Path) -> None:
    """Reports of other sizes and other files, one after another, until the process is killed."""
    turn = 0
    while True:
        turn += 1
        names = ("index.html", "tables/a.md", "tables/b.csv", f"figures/search-{turn % 3}-x.svg")
        with publishing(out) as making:
            put(making, *names, text=f"{turn}\n" * (20_000 + turn % 7 * 1000) + "end")


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_moment_leaves_every_file_whole_and_listed(tmp_path, seed):
    out, moment = tmp_path / "report", random.Random(seed)
    put(out, "notes.txt", "figures/mine.svg", text="the user's")
    with publishing(out) as making:
        put(making, "index.html", text="1\nend")
    for _ in range(20):
        child = os.fork()
        if not child:
            try:
                publish_for_ever(out)
            finally:
                os._exit(1)
        time.sleep(moment.uniform(0.002, 0.08))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = {name for name in files(out) if "/.aida" not in name and not name.startswith(".aida-report-")}
        listed = set((out / LIST).read_text().split())
        assert found - {"notes.txt", "figures/mine.svg", LIST} <= listed, "a later report can remove it"
        for name in found & listed:
            lines = (out / name).read_text().splitlines()
            assert lines[-1] == "end"
            assert set(lines[:-1]) == {lines[0]}, "of one report"
    with publishing(out) as making:
        put(making, "index.html")
    assert files(out) == {"index.html", "notes.txt", "figures/mine.svg", LIST}
    assert sorted(path.name for path in out.iterdir()) == [LIST, "figures", "index.html", "notes.txt"]


def test_the_command_killed_again_and_again_never_leaves_an_empty_page(tmp_path):
    write_run(tmp_path / "runs", spec(experiment="digits", epochs=3), [90.0, 91.0, 92.0])
    out = tmp_path / "report"
    command = [sys.executable, "-m", "aida_lab", "report", str(tmp_path / "runs"), "--out", str(out)]
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    took = time.monotonic() - began
    whole = files(out)
    for share in (0.7, 0.8, 0.9, 0.96):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(took * share)
        process.kill()
        process.wait()
        assert (out / "index.html").read_text().rstrip().endswith(MARK)
        assert {name for name in files(out) if not name.startswith(".aida-report-")} == whole
        assert all((out / name).stat().st_size for name in whole)
    subprocess.run(command, check=True, capture_output=True)
    assert files(out) == whole


def test_a_report_that_fails_leaves_the_former_one(tmp_path, monkeypatch):
    write_run(tmp_path / "runs", spec(), [1.0, 2.0, 3.0, 4.0])
    results = read([tmp_path / "runs"], declared=EXPERIMENTS)
    write(results, tmp_path / "report")
    before = {name: (tmp_path / "report" / name).read_bytes() for name in files(tmp_path / "report")}
    monkeypatch.setattr(build, "page", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(results, tmp_path / "report")
    assert {name: (tmp_path / "report" / name).read_bytes() for name in files(tmp_path / "report")} == before


# --- used folders


def test_what_a_former_report_wrote_goes_and_what_others_wrote_stays(tmp_path):
    for eps in (1e-8, 1e-6):
        write_run(tmp_path / "a", spec("adam", 0, {"eps": eps}), [1.0, 2.0, 3.0, 4.0])
    write_run(tmp_path / "b", spec("sgd", 0, experiment="digits", epochs=3), [1.0, 2.0, 3.0])
    out = tmp_path / "report"
    put(out, "tables/mine.csv", "notes.md", "figures/mine.png", text="mine")
    first = write(read([tmp_path / "a"], declared=EXPERIMENTS), out)
    assert out / "figures" / "search-eps-table-III.svg" in first.files
    second = write(read([tmp_path / "b"], declared=EXPERIMENTS), out)
    mine = {out / "tables" / "mine.csv", out / "notes.md", out / "figures" / "mine.png"}
    assert {out / name for name in files(out)} == {*second.files, *mine, out / LIST}
    assert all(path.read_text() == "mine" for path in mine)


@pytest.mark.parametrize(
    "name",
    ["../../victim.txt", "victim.txt", ".git/config", "/etc/hostname", "tables/../victim.txt", "figures/x/../a.png"],
)
def test_a_list_from_elsewhere_removes_nothing_but_reports(tmp_path, name):
    out = tmp_path / "a" / "report"
    put(tmp_path, "victim.txt", "a/report/victim.txt", "a/report/.git/config", "a/report/tables/x.txt", text="mine")
    before = files(tmp_path)
    (out / LIST).write_text(f"{name}\n")
    with publishing(out) as making:
        put(making, "index.html")
    assert files(tmp_path) == {*before, f"a/report/{LIST}", "a/report/index.html"}


def test_no_link_in_the_folder_is_written_through(tmp_path):
    outside = tmp_path / "outside"
    put(outside, "index.html", "a.md", text="theirs")
    out = tmp_path / "report"
    out.mkdir()
    (out / "index.html").symlink_to(outside / "index.html")
    with publishing(out) as making:
        put(making, "index.html")
    assert not (out / "index.html").is_symlink()
    (out / "tables").symlink_to(outside)
    (out / LIST).write_text("tables/a.md\n")
    with publishing(out) as making:
        put(making, "index.html")
    with (
        pytest.raises(StoreError, match="tables is a symbolic link, and links are not followed; remove it, or use"),
        publishing(out) as making,
    ):
        put(making, "tables/b.md")
    assert {name: (outside / name).read_text() for name in files(outside)} == {"index.html": "theirs", "a.md": "theirs"}


def test_names_out_of_a_spec_stay_within_the_folder(tmp_path):
    place = tmp_path / "deep" / "report"
    settings = ("../../../../outside", "/tmp/outside-of-aida", "..\\x", "a/b")
    for value in (0.1, 0.2):
        wanted = spec("adam", 0, dict.fromkeys(settings, value), experiment="../../../x")
        write_stepsizes(write_run(tmp_path / "runs", wanted, [1.0, 2.0, 3.0, 4.0]), "adam")
    made = write(read([tmp_path / "runs"], declared=EXPERIMENTS), place)
    assert len([path for path in made.files if path.name.startswith("search-")]) == 8  # four settings, PNG and SVG
    assert len([path for path in made.files if path.parent.name.startswith("stepsizes-")]) == 2
    assert {path.resolve().relative_to(place.resolve()).as_posix() for path in made.files} | {LIST} == files(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "runs"]
    assert not os.path.lexists("/tmp/outside-of-aida.png")


# --- two results


@pytest.mark.parametrize("turned", [False, True])
def test_a_run_with_two_results_counts_in_no_order(tmp_path, turned):
    for root, values in (("a", [90.0, 91.0, 91.5, 91.2]), ("b", [90.0, 91.0, 92.5, 92.2])):
        write_run(tmp_path / root, spec(), values)
        write_run(tmp_path / root, spec("adam"), [80.0, 81.0, 82.0, 83.0])
    roots = [tmp_path / "a", tmp_path / "b"][:: -1 if turned else 1]
    found = {run.spec.method: run for run in read_runs(roots, EXPERIMENTS).runs}
    assert (found["adam"].state, found["adam"].counts) == ("finished", True)
    assert (found["aida-k2"].state, found["aida-k2"].counts) == ("two results", False)
    assert "best 91.5, last 91.2" in found["aida-k2"].remark
    assert "best 92.5, last 92.2" in found["aida-k2"].remark
    assert found["aida-k2"].folder.parent == tmp_path / "a"
    done = CliRunner().invoke(app, ["report", *map(str, roots), "--out", str(tmp_path / "report")])
    assert done.exit_code == 0
    assert "its copies ended differently, so none counts" in done.stderr
    assert "ended differently" in (tmp_path / "report" / "tables" / "excluded.md").read_text()
