"""axolotl: a plugin that replaces the optimizer of its configuration by Aida."""

from __future__ import annotations

import ast
from typing import Any

from axolotl.integrations.base import BasePlugin

from aida.integrations.transformers import optimizer_cls_and_kwargs


class AidaPlugin(BasePlugin):
    """Trains with Aida if the configuration lists ``plugins: [aida.integrations.axolotl.AidaPlugin]``.

    ``learning_rate``, ``weight_decay`` and ``adam_beta1/2`` keep their meaning. A mapping under ``optim_args`` holds
    other arguments of :class:`aida.Aida`, such as ``eps: 1.0e-12``. ``optimizer`` is ignored.
    """

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        # axolotl 0.19 declares BasePlugin.create_optimizer but calls it nowhere
        values = {key: _parsed(value) for key, value in (cfg.get("optim_args") or {}).items()}
        trainer.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs(trainer.args, **values)


def _parsed(value: Any) -> Any:
    """The value itself, also of ``1e-12``: YAML reads a number without a point as a string."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value  # such as nonfinite: skip
