"""torchtitan's trainer on a CPU, on its debug model with Aida by ``aida.integrations.torchtitan``.

torchrun runs this file as torchtitan's own entry, which then loads ``debugmodel`` from it:
``torchrun titan_on_cpu.py --module titan_on_cpu --config debugmodel``. What torchtitan does not do on a CPU is replaced
by its own alternatives or set from outside; nothing of its trainer is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


def debugmodel() -> Any:
    """``llama3_debugmodel`` with Aida, without flex attention, which has no backward on a CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from aida.integrations.torchtitan import aida

    config = llama3_debugmodel()
    config.optimizer = aida(lr=8e-4, eps=1e-12)
    spec = config.model_spec
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelize = spec.parallelize_fn

    def parallelize_with_sums(model: nn.Module, **options: Any) -> nn.Module:
        model = parallelize(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it adds
        return model

    spec.parallelize_fn = parallelize_with_sums
    return config


def use_cpu() -> None:
    """torchtitan takes ``cuda`` if there is no accelerator."""
    import torchtitan.tools.utils as utils

    memory = SimpleNamespace(total_memory=1)
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: memory,
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
    )
    if not hasattr(dist, "set_timeout"):  # torchtitan 0.3.0 is written for a newer torch than 2.13
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


if __name__ == "__main__":
    use_cpu()
    from torchtitan.train import main

    main()
