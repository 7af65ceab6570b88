"""torchtitan: an optimizer container that takes Aida. The names that torchtitan's own takes are a closed list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from aida.optimizer import Aida


class AidaContainer(OptimizersContainer):
    """torchtitan's container, in which the optimizer's name may also be ``"Aida"``."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """That of torchtitan's container; it builds this one."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return Aida if name == "Aida" else OptimizersContainer._resolve_optimizer_factory(name)


def aida(**values: Any) -> AidaContainer.Config:
    """Configure Aida for all parameters, in place of torchtitan's ``default_adamw(...)``.

    Args:
        values: arguments of :class:`aida.Aida`, such as ``lr=3e-4`` and ``eps=1e-16``.
    """
    return AidaContainer.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="Aida", optimizer_kwargs=values)]
    )
