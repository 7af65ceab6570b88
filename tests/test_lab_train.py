"""The training loop: runs that repeat, differ, diverge, stop, go on, and cannot be lost."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aida.catalog import catalog
from aida_lab.events import Event
from aida_lab.experiments import experiments, find_experiment
from aida_lab.request import RunRequest
from aida_lab.runs.files import StoreError, read_archive
from aida_lab.runs.records import read_curve
from aida_lab.runs.store import RunFolder
from aida_lab.spec import RunSpec
from aida_lab.stopping import Stop
from aida_lab.tasks.classification import Classification
from aida_lab.training.loop import Training
from aida_lab.training.options import Options
from aida_lab.training.run import Interrupted, run
from aida_lab.workers.jobs import Jobs

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

CPU = Options(device="cpu", threads=1)


def digits(optimizer: str = "aida", **changes: Any) -> RunSpec:
    spec = RunRequest(find_experiment("digits"), (optimizer,), epochs=2).specs()[0]
    return replace(spec, **changes)


def without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


# -- what a run gives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", catalog())
def test_every_optimizer_of_the_catalog_learns_the_digits(optimizer: str, tmp_path: Path) -> None:
    result = run(digits(optimizer, epochs=3), tmp_path, CPU)
    assert result["state"] == "finished"
    assert result["epochs"] == 3
    assert result["steps"] == 3 * 24
    assert result["best"] > 30, "ten classes: guessing gives 10"


def test_a_run_folder_holds_what_a_reader_needs(tmp_path: Path) -> None:
    spec = digits(probe_every=24)
    run(spec, tmp_path, CPU)
    folder = tmp_path / spec.key
    written = json.loads((folder / "spec.json").read_text())
    assert (written["experiment"], written["optimizer"], written["seed"]) == ("digits", "aida", 0)
    session = json.loads((folder / "env.json").read_text())["sessions"][0]
    assert session["versions"]["torch"] == torch.__version__
    assert session["path"] == "plain"
    assert [row["epoch"] for row in read_curve(folder)] == [1, 2]
    assert len((folder / "stepsizes.jsonl").read_text().splitlines()) == 2 * (4 + 1), "four weights, and across them"
    assert not (folder / "checkpoints").exists()


def test_one_seed_repeats_and_two_differ(tmp_path: Path) -> None:
    curves = [
        without_seconds(read_curve(tmp_path / name / spec.key))
        for name, spec in (("a", digits()), ("b", digits()), ("c", digits(seed=1)))
        if run(spec, tmp_path / name, CPU)
    ]
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_measuring_stepsizes_changes_no_number(tmp_path: Path) -> None:
    plain, probed = digits(), digits(probe_every=5)
    assert run(plain, tmp_path, CPU) == run(probed, tmp_path, CPU)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = run(digits(), tmp_path, CPU)
    heard: list[Event] = []
    assert run(digits(), tmp_path, CPU, heard.append) == first
    assert [event.kind for event in heard] == ["skipped"]


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(tmp_path: Path) -> None:
    spec = digits("sgd", hyper={**digits("sgd").hyper, "lr": 1e20}, epochs=5)
    result = run(spec, tmp_path, CPU)
    assert result["state"] == "diverged"
    assert "loss" in result["reason"]
    assert result["epochs"] < 5


def test_any_torch_optimizer_can_be_named(tmp_path: Path) -> None:
    name, values = "torch.optim:NAdam", {"lr": 2e-3, "betas": (0.9, 0.99)}
    spec = RunRequest(find_experiment("digits"), (name,), values, epochs=3).specs()[0]
    assert run(spec, tmp_path, CPU)["best"] > 60


def test_limited_runs_train_and_measure_less(tmp_path: Path) -> None:
    assert run(digits(limit=2), tmp_path, CPU)["steps"] == 4


def test_a_warm_up_reaches_the_schedule_in_a_straight_line() -> None:
    training = Training(digits("adam", epochs=4, warmup=36), CPU)  # decays after two
    (optimizer,) = training.optimizers.values()
    base, used = float(optimizer.param_groups[0]["lr"]), []
    rows = [training.train_epoch(lambda: used.append(float(optimizer.param_groups[0]["lr"]))) for _ in range(2)]
    assert used == pytest.approx([base * min(1, n / 36) for n in range(1, 49)])
    assert [row["lr"] for row in rows] == pytest.approx([base * 24 / 36, base])


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.float32), ("bf16-true", torch.bfloat16)])
def test_bf16_runs_on_a_cpu(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = digits(precision=precision)
    assert run(spec, tmp_path, CPU)["best"] > 40
    assert {p.dtype for p in Training(spec, CPU).task.modules["model"].parameters()} == {dtype}


# -- stopping and going on ----------------------------------------------------------------------------------


def test_a_stopped_run_saves_and_ends_as_it_would_have(tmp_path: Path) -> None:
    spec = digits(epochs=4, probe_every=7)
    whole = run(spec, tmp_path / "whole", CPU)

    def stop_in_the_second_epoch(event: Event) -> None:
        if event.kind == "step" and event.epoch == 1 and event.share > 0.3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(spec, tmp_path / "stopped", CPU, stop_in_the_second_epoch)
    heard: list[Event] = []
    assert run(spec, tmp_path / "stopped", CPU, heard.append) == whole
    assert heard[0].text == "resumed at epoch 1"
    one, other = tmp_path / "whole" / spec.key, tmp_path / "stopped" / spec.key
    assert without_seconds(read_curve(one)) == without_seconds(read_curve(other))
    assert (one / "stepsizes.jsonl").read_text() == (other / "stepsizes.jsonl").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_evaluation_of_a_run_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    evaluate = Classification.evaluate

    def interrupted(task: Classification, final: bool) -> Mapping[str, float]:
        if final:
            os.kill(os.getpid(), number)
        return evaluate(task, final)

    monkeypatch.setattr(Classification, "evaluate", interrupted)
    specs = [digits(epochs=1, seed=seed) for seed in range(2)]
    with Stop() as stop:
        ended = [outcome.state for outcome in Jobs(tmp_path, CPU).work(specs, lambda event: None, stop)]
    assert (ended, stop.signal) == (["finished"], number)


def test_a_signal_while_a_run_is_being_opened_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = RunFolder.open

    def interrupted(*words: Any) -> RunFolder:
        os.kill(os.getpid(), signal.SIGINT)
        return opened(*words)

    monkeypatch.setattr(RunFolder, "open", interrupted)
    with Stop() as stop:
        (outcome,) = Jobs(tmp_path, CPU).work([digits(epochs=1)], lambda event: None, stop)
    assert outcome.state == "interrupted"


def test_going_on_with_another_number_of_threads_is_said(tmp_path: Path) -> None:
    spec = digits()

    def stop(event: Event) -> None:
        if event.kind == "step" and event.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(spec, tmp_path, CPU, stop)
    heard: list[Event] = []
    run(spec, tmp_path, replace(CPU, threads=2), heard.append)
    assert [event.text for event in heard if event.kind == "note"] == [
        "resumed with other threads: 1 before, 2 now; its numbers may differ"
    ]


def test_an_epoch_that_was_broken_off_counts_all_its_seconds(tmp_path: Path) -> None:
    spec = digits(epochs=1)

    def be_slow_and_stop(event: Event) -> None:
        if event.kind == "step" and event.share <= 0.5:
            time.sleep(0.05)
            if event.share == 0.5:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(spec, tmp_path, CPU, be_slow_and_stop)
    run(spec, tmp_path, CPU)
    assert read_curve(tmp_path / spec.key)[0]["seconds"] > 11 * 0.05


def test_a_finished_run_whose_curve_was_lost_says_how_to_train_it_again(tmp_path: Path) -> None:
    spec = digits()
    run(spec, tmp_path, CPU)
    curve = tmp_path / spec.key / "curve.jsonl"
    curve.write_text(curve.read_text().splitlines(keepends=True)[0])
    with pytest.raises(StoreError, match=rf"ends with epoch 1.*Remove {tmp_path / spec.key}, and the same command"):
        run(spec, tmp_path, CPU)


@pytest.mark.parametrize("optimizer", ["aida", "adabelief", "adamw", "sgd", "msvag", "adabound"])
def test_a_checkpoint_resumes_bit_exactly(optimizer: str) -> None:
    spec = digits(optimizer, epochs=3)
    whole = Training(spec, CPU)
    whole.train_epoch()
    state = whole.state()
    kept = torch.load(_through_a_file(state), weights_only=True)
    expected = whole.train_epoch()
    resumed = Training(spec, CPU)
    resumed.load(kept)
    assert without_seconds([resumed.train_epoch()]) == without_seconds([expected])
    for one, other in zip(
        whole.task.modules["model"].parameters(), resumed.task.modules["model"].parameters(), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_as_if_never_killed(tmp_path: Path) -> None:
    spec = digits(epochs=40, probe_every=24)
    whole = tmp_path / "whole"
    run(spec, whole, replace(CPU, checkpoint_seconds=0))
    command = [sys.executable, str(Path(__file__).with_name("killed_runs.py")), json.dumps(spec.to_json())]
    done = subprocess.run(
        [*command, str(tmp_path / "killed"), "20", "7"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["code"] == 0, done.stderr
    assert report["killed"] == 20, "the run must be longer than its killers are patient"
    one, other = whole / spec.key, tmp_path / "killed" / spec.key
    assert (one / "result.json").read_bytes() == (other / "result.json").read_bytes()
    assert without_seconds(read_curve(one)) == without_seconds(read_curve(other))
    assert (one / "stepsizes.jsonl").read_bytes() == (other / "stepsizes.jsonl").read_bytes()


def test_two_processes_never_write_one_run(tmp_path: Path) -> None:
    from aida_lab.runs.lock import RunBusyError

    with RunFolder.open(tmp_path, digits()), pytest.raises(RunBusyError):
        run(digits(), tmp_path, CPU)


def test_a_run_outside_the_main_thread_needs_no_signals(tmp_path: Path) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run(digits(epochs=1), tmp_path, CPU)))
    thread.start()
    thread.join(60)
    assert results
    assert results[0]["state"] == "finished"


# -- what is declared ---------------------------------------------------------------------------------------


def test_every_experiment_of_the_paper_is_declared() -> None:
    assert [(each.table, each.name) for each in experiments().values()] == [
        ("", "digits"), ("", "gpt-pysource"),
        ("I", "transformer-multi30k"), ("II", "lstm1-ptb"), ("II", "lstm2-ptb"), ("II", "lstm3-ptb"),
        ("III", "resnet34-cifar10"), ("III", "resnet34-cifar100"), ("III", "vgg11-cifar10"), ("III", "vgg11-cifar100"),
        ("IV", "wgan-gp-cifar10"), ("V", "resnet18-imagenet"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["vgg11-cifar10", "resnet34-cifar100"])
def test_cifar_decays_at_the_start_of_epochs_100_and_160(name: str) -> None:
    schedule = find_experiment(name).schedule
    factors = [schedule.factor(epoch, 391 * epoch, 200) for epoch in range(200)]
    assert factors[:100] == [1.0] * 100
    assert factors[100:160] == pytest.approx([0.1] * 60)
    assert factors[160:] == pytest.approx([0.01] * 40)


def test_a_shortened_run_decays_at_the_same_shares() -> None:
    schedule = find_experiment("vgg11-cifar10").schedule
    factors = [schedule.factor(epoch, 0, 60) for epoch in range(60)]
    assert factors.count(1.0) == 30
    assert sum(factor == pytest.approx(0.1) for factor in factors) == 18


def test_aida_with_one_projection_has_its_own_eps_on_cifar() -> None:
    experiment = find_experiment("vgg11-cifar10")
    assert experiment.tuned("aida")["eps"] == 1e-9
    assert experiment.tuned("aida", {"projections": 1})["eps"] == 1e-8
    assert experiment.tuned("aida", {"projections": 1, "eps": 1e-7})["eps"] == 1e-7


def test_a_spec_survives_its_file_and_a_pipe_and_keeps_its_key() -> None:
    spec = digits()
    again = RunSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.key == spec.key
    assert replace(spec, seed=1).key != spec.key
    warm = replace(spec, warmup=300)
    assert warm.key != spec.key
    assert RunSpec.from_json(warm.to_json()) == warm == pickle.loads(pickle.dumps(warm))


def test_kept_records_are_named_by_their_specs() -> None:
    """A field that a spec gets later must leave the names of earlier runs as they are."""
    kept = list((Path(__file__).parents[1] / "results").rglob("*.tar.xz"))
    assert kept
    for archive in kept:
        for name, content in read_archive(archive).items():
            if name.endswith("/spec.json"):
                assert RunSpec.from_json(json.loads(content)).key == name.split("/")[0]


def _through_a_file(state: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file
