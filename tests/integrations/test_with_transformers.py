"""The Hugging Face Trainer: its values mean to Aida what they mean to AdamW, and stepsizes are in its logs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import documented
import tiny
from aida import AcrossLayers, Aida, StepsizeProbe

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
ours = import_module("aida.integrations.transformers")

pytestmark = pytest.mark.integrations

DECAY = 0.1


class Model(nn.Module):
    """What the Trainer asks of a model: it takes the batch by name and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny.net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def arguments(folder: Path, **values: Any) -> Any:
    known = {
        "num_train_epochs": tiny.STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": tiny.LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **{**known, **values})


def trainer(args: Any, model: nn.Module, **how: Any) -> Any:
    rows = [{"x": x, "labels": y} for x, y in zip(*tiny.data(), strict=True)]
    return transformers.Trainer(model, args, train_dataset=rows, **how)


def by_trainer(folder: Path, model: nn.Module, *, decay: float, **how: Any) -> list[Tensor]:
    trainer(arguments(folder, weight_decay=decay), model, **how).train()
    return tiny.weights(model)


@pytest.fixture
def decoupled_by_hand() -> list[Tensor]:
    """Matrices shrink by lr * weight_decay, biases do not: the Trainer's groups, written out."""
    model = tiny.net()
    return tiny.train(model, [Aida(model.parameters(), lr=tiny.LR)], decay=DECAY)


def test_weight_decay_of_the_arguments_is_decoupled(tmp_path: Path, decoupled_by_hand: list[Tensor]) -> None:
    model = Model()
    how = {"optimizer_cls_and_kwargs": (Aida, {"lr": tiny.LR})}

    assert tiny.gap(by_trainer(tmp_path, model, decay=DECAY, **how), decoupled_by_hand) < 1e-6


def test_weight_decay_of_a_ready_optimizer_is_decoupled(tmp_path: Path, decoupled_by_hand: list[Tensor]) -> None:
    model = Model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = Aida([{"params": matrices, "weight_decay": DECAY}, {"params": biases}], lr=tiny.LR)

    # the arguments' own decay belongs to groups that the Trainer makes, and here it makes none
    assert tiny.gap(by_trainer(tmp_path, model, decay=7.0, optimizers=(optimizer, None)), decoupled_by_hand) < 1e-6


def test_the_decay_is_large_enough_to_tell_the_two_kinds_apart(decoupled_by_hand: list[Tensor]) -> None:
    for kind in (True, False):
        model = tiny.net()
        matrices, biases = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": biases}]
        weights = tiny.train(model, [Aida(groups, lr=tiny.LR, decoupled_weight_decay=kind)])
        assert (tiny.gap(weights, decoupled_by_hand) < 1e-6) is kind


def test_the_helper_takes_lr_betas_and_decoupled_decay_from_the_arguments(
    tmp_path: Path, decoupled_by_hand: list[Tensor]
) -> None:
    args, model = arguments(tmp_path, weight_decay=DECAY), Model()
    run = trainer(args, model, optimizer_cls_and_kwargs=ours.optimizer_cls_and_kwargs(args))
    run.train()

    assert tiny.gap(tiny.weights(model), decoupled_by_hand) < 1e-6
    args = arguments(tmp_path, adam_beta1=0.8, adam_beta2=0.99, weight_decay=DECAY)
    assert ours.optimizer_cls_and_kwargs(args, eps=1e-12, weight_decay=0.0) == (
        Aida,
        {"lr": tiny.LR, "betas": (0.8, 0.99), "weight_decay": 0.0, "eps": 1e-12},
    )


def watched(args: Any, *, callback: bool = True, **values: Any) -> tuple[Any, list[Tensor]]:
    """A Trainer whose run is over, and its weights."""
    model = Model()
    run = trainer(args, model, optimizer_cls_and_kwargs=ours.optimizer_cls_and_kwargs(args))
    if callback:
        run.add_callback(ours.StepsizeCallback(run, **values))
    run.train(resume_from_checkpoint=args.resume_from_checkpoint)
    return run, tiny.weights(model)


def logged(run: Any, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in run.state.log_history if name in line}


def test_the_callback_logs_what_a_probe_measures_and_changes_neither_weights_nor_other_logs(tmp_path: Path) -> None:
    args = arguments(tmp_path, logging_steps=2)
    run, weights = watched(args, weights_only=False)
    without, expected = watched(args, callback=False)
    model, spread = tiny.net(), {}
    optimizer = Aida(model.parameters(), lr=tiny.LR)

    def keep(record: Any) -> None:
        if isinstance(record, AcrossLayers):
            spread[record.step] = record.spread

    StepsizeProbe(optimizer, model.named_parameters(), every=2, sink=keep)
    tiny.train(model, [optimizer])

    assert tiny.gap(weights, expected) == 0
    assert logged(run, "loss") == logged(without, "loss")
    assert set(logged(run, "loss")) == {2, 4}
    assert logged(run, "stepsizes/spread") == pytest.approx(spread, rel=1e-4)
    assert set(logged(run, "stepsizes/mean/net.0.weight")) == {2, 4}


def test_the_callback_has_an_interval_values_and_a_sink_of_its_own(tmp_path: Path) -> None:
    found: list[Any] = []
    run, _ = watched(arguments(tmp_path), every=3, values=("max",), sink=found.append)

    assert set(logged(run, "stepsizes/max/net.2.weight")) == {3}
    assert not logged(run, "stepsizes/mean/net.2.weight")
    assert not logged(run, "stepsizes/max/net.2.bias")
    assert [record.step for record in found] == [3, 3, 3]  # two matrices, and the record across layers


def test_the_callback_measures_the_trainers_default_adamw_too(tmp_path: Path) -> None:
    run = trainer(arguments(tmp_path, logging_steps=2), Model())
    run.add_callback(ours.StepsizeCallback(run))
    run.train()
    assert type(run.optimizer.optimizer).__name__ == "AdamW"
    assert set(logged(run, "stepsizes/mean/net.0.weight")) == {2, 4}


def test_the_stepsizes_reach_the_tracker_of_report_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    run, _ = watched(arguments(tmp_path, logging_steps=2, report_to=["tensorboard"]))

    (file,) = (tmp_path / "board").rglob("events*")
    shown = events.EventAccumulator(str(file)).Reload().Scalars("train/stepsizes/spread")
    assert {event.step: event.value for event in shown} == pytest.approx(logged(run, "stepsizes/spread"))


def test_a_resumed_training_ends_with_the_same_bits_and_goes_on_counting(tmp_path: Path) -> None:
    whole, expected = watched(arguments(tmp_path / "a", save_strategy="steps", save_steps=2, logging_steps=3))
    checkpoint = str(tmp_path / "a" / "checkpoint-2")
    resumed, weights = watched(arguments(tmp_path / "b", logging_steps=3, resume_from_checkpoint=checkpoint))

    assert tiny.gap(weights, expected) == 0
    assert logged(resumed, "stepsizes/spread") == logged(whole, "stepsizes/spread")
    assert set(logged(resumed, "stepsizes/spread")) == {3}  # of the whole run, not of its second half


def test_the_example_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = documented.run("Hugging Face Trainer")["trainer"]
    losses = list(logged(run, "loss").values())
    assert losses[-1] < 0.5 * losses[0]
    assert len(logged(run, "stepsizes/spread")) == len(losses)
