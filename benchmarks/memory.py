"""Measure the memory that training a GPT takes with different optimizers, parameters and state.

    python benchmarks/memory.py --device cpu --models gpt2

Each configuration trains a few steps in a process of its own. On a GPU the peak is what torch's allocator held at most;
on a CPU it is the peak of the process less what it held before the model was built. Activations are part of both, so
the batch is small. Optimizers of libraries that are not installed are left out. The table goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aida import Aida
from machine import describe
from rivals import of_library

STEPS, ROWS, LENGTH, VOCABULARY = 3, 1, 64, 50_257


class Size(NamedTuple):
    layers: int
    width: int
    heads: int


MODELS = {"gpt2": Size(12, 768, 12), "gpt-1.3b": Size(24, 2048, 16)}


class Configuration(NamedTuple):
    """An optimizer, the dtype of the parameters, and whether it steps inside the backward pass."""

    make: Callable[..., Any]
    dtype: torch.dtype = torch.float32
    in_backward: bool = False


def aida(dtype: torch.dtype = torch.float32, in_backward: bool = False, **values: Any) -> Configuration:
    return Configuration(lambda params: Aida(params, lr=1e-4, **values), dtype, in_backward)


def adamw(dtype: torch.dtype = torch.float32) -> Configuration:
    return Configuration(lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True), dtype)


def of(library: str, **values: Any) -> Configuration:
    return Configuration(of_library(library, lr=1e-4, **values), torch.bfloat16)


LOW = torch.bfloat16
CONFIGURATIONS = {
    "AdamW fused": adamw(),
    "AdamW fused, bf16 parameters": adamw(LOW),
    "Aida": aida(),
    "Aida, bf16 state": aida(state_precision="bfloat16"),
    "Aida, fp8 state": aida(state_precision="fp8"),
    "Aida, bf16 parameters with a Kahan sum, fp8 state": aida(LOW, state_precision="fp8", kahan_sum=True),
    "Aida, bf16 parameters, fp8 state": aida(LOW, state_precision="fp8", stochastic_rounding=True),
    "the same, stepping in backward": aida(LOW, True, state_precision="fp8", stochastic_rounding=True),
    "Aida, state on the CPU (CPUOffload)": Configuration(of_library("aida:CPUOffload", lr=1e-4)),
    "torchao AdamW8bit, bf16 parameters": of("torchao.optim:AdamW8bit", bf16_stochastic_round=True),
    "torchao AdamWFp8, bf16 parameters": of("torchao.optim:AdamWFp8", bf16_stochastic_round=True),
    "bitsandbytes AdamW8bit, bf16 parameters": of("bitsandbytes.optim:AdamW8bit"),
    "optimi AdamW with a Kahan sum, bf16 parameters": of("optimi:AdamW", kahan_sum=True),
}


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(size.width, size.heads, 4 * size.width, 0.0, batch_first=True, norm_first=True)
            for _ in range(size.layers)
        )

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return nn.functional.cross_entropy((x @ self.words.weight.T).flatten(0, 1).float(), text[:, 1:].flatten())


def peak(device: str) -> int:
    """Bytes of this process at most so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])


def measure(name: str, model_name: str, device: str) -> dict[str, float]:
    """Train in this process; returns gibibytes at the peak, and bytes of parameters and state per parameter."""
    make, dtype, in_backward = CONFIGURATIONS[name]
    torch.manual_seed(0)
    text = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), device=device)
    before = peak(device)
    with torch.device(device):
        model = GPT(MODELS[model_name]).to(dtype)
    optimizer = make(model.parameters())
    if in_backward:
        optimizer.step_in_backward()
    for _ in range(STEPS):
        model(text).backward()
        optimizer.step()
        optimizer.zero_grad()
    count = sum(p.numel() for p in model.parameters())
    state = sum(map(bytes_of, (value for state in optimizer.state.values() for value in state.values())))
    return {"peak": (peak(device) - before) / 2**30, "state": state / count, "parameters": count}


def bytes_of(value: Any) -> int:
    """Of a tensor, or of the tensors inside a subclass."""
    if not isinstance(value, Tensor):
        return 0
    if hasattr(value, "__tensor_flatten__"):
        return sum(bytes_of(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.element_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["gpt2"])
    parser.add_argument("--only", metavar="PATTERN", default="", help="configurations whose name this expression finds")
    parser.add_argument("--one", nargs=2, metavar=("CONFIGURATION", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.device)))
        return
    print("; ".join(f"{key} {value}" for key, value in describe(torch.device(options.device)).items() if value), "\n")
    for model in options.models:
        print(f"| {model} | state, bytes per parameter | peak, GiB | of AdamW fused |\n|---|---:|---:|---:|")
        reference = None
        for name in CONFIGURATIONS:
            if not re.search(options.only, name):
                continue
            command = [sys.executable, __file__, "--device", options.device, "--one", name, model]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            reference = reference or found["peak"]
            print(
                f"| {name} | {found['state']:.2f} | {found['peak']:.2f} | {found['peak'] / reference:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
