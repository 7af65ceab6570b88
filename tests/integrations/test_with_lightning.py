"""Lightning's Trainer takes the default Aida wherever it takes the default AdamW, and trains as a hand loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import tiny
from aida import Aida

lightning = pytest.importorskip("lightning")
MixedPrecision = pytest.importorskip("lightning.pytorch.plugins.precision").MixedPrecision

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
