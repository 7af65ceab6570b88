"""Records that come back from a file as they went in, also from a file that a crash cut short."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from aida import Aida
from aida.stepsizes import AcrossLayers, StepsizeProbe
from aida.stepsizes.sinks import JsonLines, TensorBoard, read_jsonl


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


def test_tensorboard_gets_every_number(records, tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoard(tmp_path)
    for record in records:
        sink(record)
    sink.close()
    events = accumulators.EventAccumulator(str(tmp_path)).Reload()
    means = events.Scalars("stepsizes/mean/p")
    assert [event.step for event in means] == [1, 2]
    assert means[0].value == pytest.approx(records[0].mean)
    assert events.Scalars("stepsizes/spread")[-1].value == pytest.approx(records[-1].spread)
    assert events.Scalars("stepsizes/quantile_0.5/q")[0].value == pytest.approx(dict(records[1].quantiles)[0.5])
