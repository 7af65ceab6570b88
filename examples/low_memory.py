"""What do 8-bit state and bf16 parameters cost? A small GPT, trained with each of Aida's ways to save memory.

    python examples/low_memory.py                       # about four minutes per seed on one core of an EPYC
    python examples/low_memory.py --seeds 0 1 2

The text is Python's standard library, as bytes, so nothing is downloaded. Every run sees the same batches and the same
schedule: linear warm-up over 100 steps, then cosine to a tenth. Parameters in bf16 also compute in bf16. The table has
the validation loss in nats per byte, and the bytes that the optimizer keeps per parameter.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from aida import Aida
from aida_lab.data.pysource import standard_library
from aida_lab.models.gpt import GPT

CONTEXT, BATCH, WARM_UP = 64, 32, 100
LOW = torch.bfloat16

RUNS = {
    "float32": (torch.float32, {}),
    "bf16 state": (torch.float32, {"state_precision": "bfloat16"}),
    "fp8 state": (torch.float32, {"state_precision": "fp8"}),
    "bf16 parameters": (LOW, {}),
    "bf16 parameters, stochastic rounding": (LOW, {"stochastic_rounding": True}),
    "bf16 parameters, Kahan sum": (LOW, {"kahan_sum": True}),
    "bf16 parameters, stochastic rounding, fp8 state": (LOW, {"stochastic_rounding": True, "state_precision": "fp8"}),
}


def windows(text: Tensor) -> Tensor:
    return text.unfold(0, CONTEXT + 1, CONTEXT).long()


def loss(model: GPT, rows: Tensor) -> Tensor:
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


def train(name: str, seed: int, steps: int, lr: float) -> tuple[float, float]:
    """Validation loss at the end, and bytes of state per parameter."""
    dtype, storage = RUNS[name]
    source = standard_library()
    rows, valid = windows(source.train), windows(source.valid)
    torch.manual_seed(seed)
    model = GPT(source.vocabulary, context=CONTEXT, width=64, layers=2, heads=4).to(dtype)
    optimizer = Aida(
        model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-16, clip_norm=1.0, rounding_seed=seed, **storage
    )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).repeat(
        1 + steps * BATCH // len(rows)
    )
    for step in range(steps):
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARM_UP) * cosine
        optimizer.zero_grad()
        loss(model, rows[order[step * BATCH : (step + 1) * BATCH]]).backward()
        optimizer.step()
    with torch.no_grad():
        found = sum(float(loss(model, part)) * len(part) for part in valid.split(256)) / len(valid)
    tensors = [t for state in optimizer.state.values() for name, t in state.items() if name not in ("step", "skipped")]
    return found, sum(t.nbytes for t in tensors) / sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="steps per run (default 600)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after the warm-up (default 1e-3)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds (default 0)")
    options = parser.parse_args()
    print(f"{'':50} {'bytes':>6}  validation loss, seeds {' '.join(map(str, options.seeds))}")
    for name in RUNS:
        found = [train(name, seed, options.steps, options.lr) for seed in options.seeds]
        print(f"{name:50} {found[0][1]:6.2f}  {'  '.join(f'{one:.4f}' for one, _ in found)}", flush=True)


if __name__ == "__main__":
    main()
