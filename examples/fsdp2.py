"""Sharded training with FSDP2: train, clip, save, resume. The result is that of one process.

    torchrun --nproc-per-node 2 examples/fsdp2.py

A small GPT learns the characters of this file. On machines with GPUs each process takes one; otherwise the processes
communicate over gloo. Nothing but the import is particular to Aida: torch shards the model, and Aida reads the shards.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from aida import Aida

WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 4, 2, 64, 16, 30


class Block(nn.Module):
    """Causal self-attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, text: Tensor) -> Tensor:
        """Mean cross-entropy of each character given those before it in its row."""
        x = self.characters(text[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def make(device: str) -> GPT:
    torch.manual_seed(0)  # the same weights in every process
    return GPT().to(device)


def sharded(device: str) -> GPT:
    model, mesh = make(device), init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build(model: nn.Module) -> Aida:
    # two groups, because each of the fused queries, keys and values is a layer of its own
    qkv = [p for name, p in model.named_parameters() if "qkv" in name]
    others = [p for name, p in model.named_parameters() if "qkv" not in name]
    groups = [{"params": others}, {"params": qkv, "split_sizes": (WIDTH, WIDTH, WIDTH)}]
    return Aida(groups, lr=3e-3, eps=1e-12, weight_decay=0.01, clip_norm=1.0)


def rows(step: int, device: str) -> Tensor:
    """The batch of a step: the same in every process, which then takes its part of the rows."""
    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=torch.Generator().manual_seed(step)).to(device)
    return text[starts + torch.arange(LENGTH + 1, device=device)]


def train(model: nn.Module, optimizer: Optimizer, steps: range, device: str, part: slice = slice(None)) -> Tensor:
    """Train and return the last loss of this process."""
    for step in steps:
        loss: Tensor = model(rows(step, device)[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def mean(loss: Tensor) -> float:
    """The mean over all processes."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start this example with: torchrun --nproc-per-node 2 examples/fsdp2.py")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    half = STEPS // 2
    # all processes write to one folder; on several machines it must be on a shared file system
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)

    # train, and save a checkpoint half way
    model = sharded(device)
    optimizer = build(model)
    train(model, optimizer, range(half), device, mine)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder[0])
    straight = mean(train(model, optimizer, range(half, STEPS), device, mine))
    say(f"{dist.get_world_size()} processes: loss {straight:.4f} after {STEPS} steps")

    # resume from the checkpoint, with a new model and a new optimizer; another number of processes may do this
    resumed = sharded(device)
    optimizer = build(resumed)
    states = get_state_dict(resumed, optimizer)
    saved = {"model": states[0], "optimizer": states[1]}
    dcp.load(saved, checkpoint_id=folder[0])
    set_state_dict(resumed, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    again = mean(train(resumed, optimizer, range(half, STEPS), device, mine))
    say(f"resumed from a checkpoint: loss {again:.4f}, difference {abs(again - straight):.1e}")

    # the same training in one process, with whole tensors and all rows
    whole = make(device)
    alone = train(whole, build(whole), range(STEPS), device).item()
    weights = [  # a list, because every process must gather every weight
        (p.full_tensor() - q).abs().max().item()  # type: ignore[attr-defined]
        for p, q in zip(model.parameters(), whole.parameters(), strict=True)
    ]
    say(
        f"one process: loss {alone:.4f}, difference {abs(alone - straight):.1e}; largest of a weight {max(weights):.1e}"
    )
    dist.barrier()  # gloo may abort a process whose peer has exited
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
