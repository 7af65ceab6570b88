"""Lightning's Trainer takes the default Aida wherever it takes the default AdamW, and trains as a hand loop does."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import documented
import tiny
from aida import AcrossLayers, Aida, StepsizeProbe

lightning = pytest.importorskip("lightning")
MixedPrecision = pytest.importorskip("lightning.pytorch.plugins.precision").MixedPrecision

StepsizeMonitor = import_module("aida.integrations.lightning").StepsizeMonitor

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

#: Lightning's names, and what they mean: the dtype of the parameters, and of autocast.
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "bf16-true": (torch.bfloat16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.bfloat16),  # without a GPU Lightning takes bfloat16
    "16-mixed with a GradScaler": (torch.float32, torch.float16),  # what it does on a GPU
}
CLIP = 0.3


class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self, kind: type[Optimizer], values: dict[str, Any]) -> None:
        super().__init__()
        self.net = tiny.net()
        self.kind, self.values = kind, values

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = (t.to(next(self.parameters()).dtype) for t in batch)
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Optimizer:
        return self.kind(self.parameters(), lr=tiny.LR, **self.values)


def fit(folder: Path, kind: type[Optimizer], precision: str, clip: float | None, **values: Any) -> list[Tensor]:
    module = Module(kind, values)
    scaled = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]
    how = {"precision": precision} if not precision.endswith("GradScaler") else {"plugins": scaled}
    trainer = lightning.Trainer(
        **how,
        max_epochs=tiny.STEPS,
        gradient_clip_val=clip,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*tiny.data()), batch_size=8))
    return tiny.weights(module)


@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_default_aida_trains_as_by_hand_in_every_precision_with_and_without_clipping(
    tmp_path: Path, precision: str, clip: float | None
) -> None:
    dtype, autocast = PRECISIONS[precision]
    model = tiny.net(dtype)
    by_hand = tiny.train(model, [Aida(model.parameters(), lr=tiny.LR)], clip=clip, autocast=autocast)

    assert tiny.gap(by_hand, tiny.weights(tiny.net(dtype))) > 1e-2, "the loop does nothing"
    assert tiny.gap(fit(tmp_path, Aida, precision, clip), by_hand) == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradient_clipping_is_refused_only_where_the_same_adamw_is(tmp_path: Path, precision: str) -> None:
    def outcome(kind: type[Optimizer], fused: bool | None) -> str:
        try:
            fit(tmp_path, kind, precision, CLIP, fused=fused)
        except RuntimeError as error:
            return str(error).replace(kind.__name__, "Optimizer")
        return "trained"

    for fused in (None, False, True):
        assert outcome(Aida, fused) == outcome(AdamW, fused)


class Kept(lightning.pytorch.loggers.logger.DummyLogger):  # type: ignore[name-defined,misc]
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        self.lines.append((step, dict(metrics)))

    def of(self, name: str) -> dict[int, float]:
        return {step: metrics[name] for step, metrics in self.lines if name in metrics}


def monitored(module: Any, folder: Path, monitor: Any = None, **how: Any) -> tuple[Any, Kept]:
    """The Trainer after training with the monitor, and what its logger received."""
    logger = Kept()
    known = {"max_epochs": tiny.STEPS, "enable_checkpointing": False, "logger": logger, "log_every_n_steps": 2}
    run = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[monitor or StepsizeMonitor()],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**known, **how},
    )
    return run, logger


def loader() -> Any:
    return DataLoader(TensorDataset(*tiny.data()), batch_size=8)


def test_the_monitor_logs_what_a_probe_measures_and_does_not_change_the_weights(tmp_path: Path) -> None:
    module, model, spread = Module(Aida, {}), tiny.net(), {}
    run, logger = monitored(module, tmp_path)
    run.fit(module, loader())
    optimizer = Aida(model.parameters(), lr=tiny.LR)

    def keep(record: Any) -> None:
        if isinstance(record, AcrossLayers):
            spread[record.step] = record.spread

    StepsizeProbe(optimizer, model.named_parameters(), every=2, sink=keep, weights_only=True)
    assert tiny.gap(tiny.weights(module), tiny.train(model, [optimizer])) == 0
    assert logger.of("stepsizes/spread") == spread
    assert set(spread) == {2, 4}
    assert set(logger.of("stepsizes/mean/net.0.weight")) == {2, 4}


def test_a_monitor_without_a_logger_is_refused(tmp_path: Path) -> None:
    run, _ = monitored(module := Module(Aida, {}), tmp_path, logger=False)
    with pytest.raises(lightning.pytorch.utilities.exceptions.MisconfigurationException, match="needs a logger"):
        run.fit(module, loader())


class TwoOptimizers(Module):
    """One optimizer per layer, stepped by hand, as for a GAN."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, number)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[Optimizer]:  # type: ignore[override]
        return [Aida(self.net[index].parameters(), lr=tiny.LR) for index in (0, 2)]


def test_two_optimizers_have_names_of_their_own(tmp_path: Path) -> None:
    run, logger = monitored(module := TwoOptimizers(Aida, {}), tmp_path)
    run.fit(module, loader())

    assert set(logger.of("stepsizes/mean/net.0.weight")) == {2, 4}
    assert set(logger.of("stepsizes-1/mean/net.2.weight")) == {2, 4}
    assert not logger.of("stepsizes/mean/net.2.weight")


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_a_resumed_run_ends_with_the_same_bits_and_goes_on_counting(tmp_path: Path, precision: str) -> None:
    how: dict[str, Any] = {"precision": precision, "gradient_clip_val": CLIP, "log_every_n_steps": 1}
    whole, first, second = (Module(Aida, {}) for _ in range(3))
    run, logger = monitored(whole, tmp_path, **how)
    run.fit(whole, loader())
    half, _ = monitored(first, tmp_path, **{**how, "max_epochs": 2})
    half.fit(first, loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, later = monitored(second, tmp_path, **how)
    resumed.fit(second, loader(), ckpt_path=str(tmp_path / "half.ckpt"), weights_only=False)

    assert tiny.gap(tiny.weights(second), tiny.weights(whole)) == 0
    assert later.of("stepsizes/spread") == {step: logger.of("stepsizes/spread")[step] for step in (3, 4)}


def test_the_example_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    documented.run("Lightning")
    (table,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(table.open()))
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert losses[-1] < losses[0]
    assert any(row["stepsizes/spread"] for row in rows)
