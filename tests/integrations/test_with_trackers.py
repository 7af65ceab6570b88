"""Stepsizes in experiment trackers, with the real libraries, offline."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import documented
from aida import Aida, StepsizeProbe, sink
from aida.stepsizes import MLflow, Record, Wandb, scalars

pytestmark = pytest.mark.integrations


def measured(to: Any, every: int = 1, after_step: Any = None) -> dict[int, dict[str, float]]:
    """The numbers of each measured step that a sink was given; the layers of a stack have brackets in their names."""
    expected: dict[int, dict[str, float]] = {}
    stack = nn.Parameter(torch.ones(2, 3, 4))
    optimizer = Aida([stack], layer_dims=1)

    def both(record: Record) -> None:
        expected.setdefault(record.step, {}).update(scalars(record))
        to(record)

    StepsizeProbe(optimizer, [("experts", stack)], every=every, sink=both)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 5):
        stack.grad = torch.randn(stack.shape, generator=generator)
        optimizer.step()
        if after_step is not None:
            after_step(step)
    return expected


def lines_of(data: bytes) -> list[Any]:
    """The messages in the file of an offline run: protobuf in the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record as Line

    place, message, found = 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # the end of a block is padding
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if place > len(data):
            break  # being written
        if kind in (1, 4):  # a whole message, or the last part of one
            found.append(Line.FromString(message))
            message = b""
    return found


def rows_of(run: Any) -> list[dict[str, float]]:
    """The history of an offline run of Weights & Biases, which writes its file in the background."""
    end = time.monotonic() + 60
    lines: list[Any] = []
    while all(line.WhichOneof("record_type") != "exit" for line in lines):
        assert time.monotonic() < end, "the run did not write its last record"
        time.sleep(0.1)
        lines = lines_of(Path(run.settings.sync_file).read_bytes())
    rows = [line.history.item for line in lines if line.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


@pytest.fixture
def wandb_run(tmp_path: Path) -> Any:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="test")
    yield run
    run.finish()


@pytest.mark.parametrize("given", ["by name", "as a run"])
def test_weights_and_biases_gets_every_number_on_an_axis_of_its_own(wandb_run: Any, given: str) -> None:
    to = sink("wandb" if given == "by name" else wandb_run)
    assert isinstance(to, Wandb)
    expected = measured(to, every=2)
    wandb_run.finish()
    rows = rows_of(wandb_run)
    assert {row["stepsizes/step"] for row in rows} == {2, 4}
    for row in rows:
        numbers = {key: value for key, value in row.items() if key not in ("stepsizes/step",) and key[0] != "_"}
        assert numbers == pytest.approx(expected[int(row["stepsizes/step"])])


@pytest.mark.parametrize("with_step", [False, True])
def test_what_the_caller_logs_to_weights_and_biases_stays_whole(wandb_run: Any, with_step: bool) -> None:
    def log_loss(step: int) -> None:
        wandb_run.log({"loss": 1 / step}, **({"step": step} if with_step else {}))

    measured(sink(wandb_run), after_step=log_loss)
    wandb_run.finish()
    assert [row["loss"] for row in rows_of(wandb_run) if "loss" in row] == [1 / step for step in range(1, 5)]
    assert [row["stepsizes/step"] for row in rows_of(wandb_run) if "stepsizes/step" in row] == [1, 2, 3, 4]


def test_without_an_active_run_of_weights_and_biases_the_error_names_the_way_out() -> None:
    pytest.importorskip("wandb")
    with pytest.raises(RuntimeError, match=r"call wandb\.init\(\) before"):
        sink("wandb")


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its databases need packages that mlflow-skinny has not
    before = module.get_tracking_uri()
    module.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield module
    module.end_run()
    module.set_tracking_uri(before)


@pytest.mark.parametrize("given", ["by name", "as a run"])
def test_mlflow_gets_every_number_at_its_step(mlflow: Any, given: str) -> None:
    run = mlflow.start_run()
    if given == "as a run":
        mlflow.end_run()  # a run that is over can still be written to
    to = sink("mlflow" if given == "by name" else run)
    assert isinstance(to, MLflow)
    expected = measured(to, every=2)

    client, found = mlflow.MlflowClient(), {}
    for name in client.get_run(run.info.run_id).data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            found.setdefault(metric.step, {})[name] = metric.value
    assert set(found) == {2, 4}
    for step, numbers in expected.items():
        assert found[step] == pytest.approx({k.replace("[", ".").replace("]", ""): v for k, v in numbers.items()})
    assert "stepsizes/mean/experts.1" in found[2]


def test_the_example_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    documented.run("Experiment trackers")
    board = events.EventAccumulator(str(tmp_path / "run" / "board")).Reload()
    assert [event.step for event in board.Scalars("stepsizes/spread")] == [10, 20, 30, 40, 50]
    assert len((tmp_path / "run" / "stepsizes.csv").read_text().splitlines()) == 1 + 5 * 3
