"""A model under tensor parallelism, with FSDP2 and HSDP on top, trains as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from aida import Aida
from processes import together

#: float64, in which gradients that torch adds in another order differ by rounding only
DTYPE = torch.float64
MESHES = {
    "FSDP2 on TP": ((2, 2), ("shard", "tp")),
    "HSDP on TP": ((2, 2, 2), ("replicate", "shard", "tp")),
    "TP": ((4,), ("tp",)),
}


class Net(nn.Module):
    """Two layers in a tensor-parallel plan and one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.down(torch.tanh(self.up(x))))


def trained(clip: float | None, mesh: str = "") -> list[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net().to(DTYPE)
    if mesh:
        shape, names = MESHES[mesh]
        whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize_module(model, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if len(names) > 1:
            fully_shard(model, mesh=whole[names[:-1]])
    optimizer = Aida(model.parameters(), lr=1e-2, eps=1e-12, clip_norm=clip, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x, y = torch.randn(8, 6, generator=generator, dtype=DTYPE), torch.randn(8, 3, generator=generator, dtype=DTYPE)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


@pytest.mark.parametrize("mesh", MESHES)
def test_parallel_training_gives_the_weights_of_one_process(mesh: str) -> None:
    clips = (None, 0.3)
    ranks = torch.Size(MESHES[mesh][0]).numel()
    found = together(*(partial(trained, clip, mesh) for clip in clips), ranks=ranks, limit=120)
    for clip, outcomes in zip(clips, found, strict=True):
        due = trained(clip)
        for weights in outcomes:
            assert max(float((a - b).abs().max()) for a, b in zip(weights, due, strict=True)) < 1e-12
