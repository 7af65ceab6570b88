"""axolotl's plugin manager loads the plugin by its name, and the Trainer then trains with Aida and axolotl's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from aida import Aida
from test_with_transformers import DECAY, Model, arguments, trainer

base = pytest.importorskip("axolotl.integrations.base")
DictDefault = pytest.importorskip("axolotl.utils.dict").DictDefault

pytestmark = pytest.mark.integrations


def trained(folder: Path, **optim_args: Any) -> tuple[Any, Model]:
    """What axolotl's train() does with a plugin: register it by name, make the Trainer, tell the plugin."""
    cfg = DictDefault(plugins=["aida.integrations.axolotl.AidaPlugin"], optimizer="adamw_torch", optim_args=optim_args)
    manager = base.PluginManager()
    for name in cfg.plugins:
        manager.register(name)
    model = Model()
    run = trainer(arguments(folder, weight_decay=DECAY), model)
    manager.post_trainer_create(cfg, run)
    run.train()
    return run, model


def test_the_plugin_trains_with_aida_and_the_values_of_the_configuration(tmp_path: Path) -> None:
    run, model = trained(tmp_path)
    by_hand = tiny.net()

    assert isinstance(run.optimizer.optimizer, Aida)
    expected = tiny.train(by_hand, [Aida(by_hand.parameters(), lr=tiny.LR)], decay=DECAY)
    assert tiny.gap(tiny.weights(model), expected) < 1e-6


def test_optim_args_are_aidas_arguments_also_where_yaml_reads_a_number_as_a_string(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, eps="1e-12", projections=1, nonfinite="raise")
    (group, _) = run.optimizer.param_groups
    assert (group["eps"], group["projections"], group["nonfinite"]) == (1e-12, 1, "raise")
