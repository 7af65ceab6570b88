"""Records that come back from a file as they went in, also from a file that a crash cut short."""

from __future__ import annotations

import csv
import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from aida import Aida
from aida.stepsizes import AcrossLayers, StepsizeProbe
from aida.stepsizes.sinks import CsvFile, JsonLines, read_jsonl
from aida.stepsizes.trackers import TensorBoard, scalars, sink


@pytest.fixture
def records():
    """The records of two measurements over two layers."""
    p, q = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))
    optimizer = Aida([p, q])
    found = []
    StepsizeProbe(optimizer, [("p", p), ("q", q)], every=1, sink=found.append)
    for _ in range(2):
        p.grad, q.grad = torch.randn(4, 3), torch.randn(3)
        optimizer.step()
    return found


def write(path, records) -> None:
    with JsonLines(path) as sink:
        for record in records:
            sink(record)


def test_records_come_back_as_they_were(records, tmp_path):
    path = tmp_path / "run" / "stepsizes.jsonl"  # the folder is made
    write(path, records)
    log = read_jsonl(path)
    assert list(log.layers) == [r for r in records if not isinstance(r, AcrossLayers)]
    assert list(log.across) == [r for r in records if isinstance(r, AcrossLayers)]
    assert log.damaged == ()
    assert log.method == "Aida"


def test_a_spread_without_end_comes_back(records, tmp_path):
    (across,) = [dataclasses.replace(r, spread=math.inf) for r in records if isinstance(r, AcrossLayers)][:1]
    write(tmp_path / "a.jsonl", [*(r for r in records if not isinstance(r, AcrossLayers)), across])
    assert read_jsonl(tmp_path / "a.jsonl").across == (across,)


def test_a_line_holds_a_layer_with_step_method_and_values(records, tmp_path):
    write(tmp_path / "a.jsonl", records)
    line = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    assert (line["step"], line["layer"], line["method"]) == (1, "p", "Aida")
    assert line["hyper"]["betas"] == [0.9, 0.999]


def test_a_complete_measurement_can_be_read_while_the_file_is_open(records, tmp_path):
    sink = JsonLines(tmp_path / "a.jsonl")
    for record in records[:3]:
        sink(record)
    assert len(read_jsonl(tmp_path / "a.jsonl").layers) == 2
    sink.close()


def test_a_second_sink_appends(records, tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, records[:3])
    write(path, records[3:])
    assert len(read_jsonl(path).layers) == 4


def test_a_cut_last_line_is_left_out_and_reported(records, tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, records)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.warns(UserWarning, match=r"skipped unreadable lines: 6"):
        log = read_jsonl(path)
    assert log.damaged == (6,)
    assert len(log.layers) == 4
    assert len(log.across) == 1


def test_a_run_that_goes_on_after_a_crash_loses_the_cut_line_alone(records, tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, records[:3])
    path.write_bytes(path.read_bytes()[:-10])
    write(path, records[3:])
    with pytest.warns(UserWarning, match="unreadable lines: 3"):
        log = read_jsonl(path)
    assert len(log.layers) == 4
    assert [record.step for record in log.across] == [2]


def test_what_is_not_finite_is_valid_json_and_comes_back(records, tmp_path):
    odd = dataclasses.replace(records[0], mean=math.nan, max=math.inf)
    write(tmp_path / "a.jsonl", [odd])
    assert "NaN" not in (tmp_path / "a.jsonl").read_text()
    assert math.isnan(read_jsonl(tmp_path / "a.jsonl").layers[0].mean)


def test_a_file_without_records_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("not json\n{}\n")
    with pytest.raises(ValueError, match=r"no stepsize record and 2 unreadable lines"):
        read_jsonl(path)


def scalars_of(folder):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulators.EventAccumulator(str(folder)).Reload()


def test_tensorboard_gets_every_number(records, tmp_path):
    with TensorBoard(tmp_path) as board:
        for record in records:
            board(record)
    events = scalars_of(tmp_path)
    means = events.Scalars("stepsizes/mean/p")
    assert [event.step for event in means] == [1, 2]
    assert means[0].value == pytest.approx(records[0].mean)
    assert events.Scalars("stepsizes/spread")[-1].value == pytest.approx(records[-1].spread)
    assert events.Scalars("stepsizes/quantile_0.5/q")[0].value == pytest.approx(dict(records[1].quantiles)[0.5])


def test_a_writer_of_the_caller_gets_the_same_numbers_and_stays_open(records, tmp_path):
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    with sink(writer) as board:
        for record in records:
            board(record)
    writer.add_scalar("loss", 1.0, 2)
    writer.close()
    events = scalars_of(tmp_path)
    assert set(events.Tags()["scalars"]) == {"loss", *(name for record in records for name in scalars(record))}


def test_csv_has_one_row_per_record_with_every_number(records, tmp_path):
    with CsvFile(tmp_path / "run" / "a.csv") as file:  # the folder is made
        for record in records:
            file(record)
    rows = list(csv.DictReader((tmp_path / "run" / "a.csv").open()))
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        assert int(row["step"]) == record.step
        if isinstance(record, AcrossLayers):
            assert (row["layer"], float(row["spread"])) == ("", record.spread)
        else:
            assert (row["layer"], row["spread"]) == (record.layer, "")
            assert [float(row[key]) for key in ("mean", "scale_m", "lr")] == [record.mean, record.scale_m, 1e-3]
            assert [float(row[f"quantile_{level:g}"]) for level, _ in record.quantiles] == [
                v for _, v in record.quantiles
            ]


def test_a_csv_file_goes_on_after_a_crash_under_the_same_columns(records, tmp_path):
    path = tmp_path / "a.csv"
    for part in (records[:3], records[3:]):
        with CsvFile(path) as file:
            for record in part:
                file(record)
        path.write_bytes(path.read_bytes()[:-2])  # the crash cut the last line short
    rows = list(csv.DictReader(path.open()))
    assert [(row["step"], row["layer"]) for row in rows] == [(s, n) for s in "12" for n in ("p", "q", "")]


def test_a_csv_file_with_other_columns_is_refused(records, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("epoch,loss\n1,2\n")
    with CsvFile(path) as file, pytest.raises(ValueError, match=r"no column for .*mean.*choose another file"):
        file(records[0])


def test_one_call_finds_the_sink_for_what_the_user_has(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    assert isinstance(sink("a.jsonl"), JsonLines)
    assert isinstance(sink(tmp_path / "a.csv"), CsvFile)
    with sink("tensorboard") as board:
        assert isinstance(board, TensorBoard)
    assert list((tmp_path / "runs").iterdir())
    own = [].append
    assert sink(own) is own


def test_a_sink_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(
        ValueError, match=r"'tensorbord'; known are tensorboard, wandb, mlflow, and files .*\.jsonl or \.csv"
    ):
        sink("tensorbord")
    with pytest.raises(TypeError, match=r"no sink for a int; pass a file name"):
        sink(3)
