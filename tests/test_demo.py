"""The demo, shortened: real runs of six optimizers, and a report over them."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aida_lab.cli import app
from aida_lab.cli.demo import METHODS
from aida_lab.runs.records import scan

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.mark.slow
def test_the_demo_trains_and_reports_what_it_trained(tmp_path: Path) -> None:
    words = ["demo", "--out", str(tmp_path), "--jobs", "2", "--epochs", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    records = scan(tmp_path / "runs")
    assert len(records) == 3 * len(METHODS)
    assert {record.state for record in records} == {"finished"}
    page = tmp_path / "report" / "index.html"
    assert str(page) in done.output.replace("\n", "")
    assert "<html" in page.read_text()

    with (tmp_path / "report" / "tables" / "configurations.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == set(METHODS)
    for method, row in rows.items():
        bests = [
            each.result["best"]
            for each in records
            if each.spec is not None and each.spec.method == method and each.result
        ]
        assert int(row["best_n"]) == 3
        assert float(row["best_mean"]) == pytest.approx(statistics.mean(bests))
        assert float(row["best_std"]) == pytest.approx(statistics.stdev(bests))
        assert row["seconds_mean"] == ""  # two runs at a time share the CPU: their times are not compared

    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0
    assert again.output.count("already finished") == 3 * len(METHODS)
