"""The Hugging Face Trainer: its ``weight_decay`` means to Aida what it means to AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import tiny
from aida import Aida

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.integrations

DECAY = 0.1


class Model(nn.Module):
    """What the Trainer asks of a model: it takes the batch by name and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny.net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def by_trainer(folder: Path, model: nn.Module, *, decay: float, **how: Any) -> list[Tensor]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=tiny.STEPS,
        per_device_train_batch_size=8,
        learning_rate=tiny.LR,
        lr_scheduler_type="constant",
        weight_decay=decay,
        max_grad_norm=0.0,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"x": x, "labels": y} for x, y in zip(*tiny.data(), strict=True)]
    transformers.Trainer(model, arguments, train_dataset=rows, **how).train()
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
