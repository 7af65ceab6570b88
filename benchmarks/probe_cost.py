"""What a stepsize probe costs a training run of ResNet34 on 32 x 32 images.

    python benchmarks/probe_cost.py                          # the GPU where there is one, else the CPU
    python benchmarks/probe_cost.py --device cpu --batch 16 --steps 4

Times whole training steps (forward, backward, optimizer), then single measurements from the call to
the numbers on the host. The share is one measurement over ``--every`` steps: an upper limit, since the
host's wait for the device is counted although the device works through its queue meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from aida.catalog import find
from aida.stepsizes import StepsizeProbe
from machine import describe

#: Channels and blocks of the four stages.
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet34() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for channels, blocks in STAGES:
        for block in range(blocks):
            layers.append(Block(inputs, channels, 2 if block == 0 and inputs != channels else 1))
            inputs = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def timed(work: Callable[[], object], device: torch.device, times: int) -> list[float]:
    """Seconds of each call, the device idle before and after."""
    found = []
    for _ in range(times):
        _wait(device)
        start = perf_counter()
        work()
        _wait(device)
        found.append(perf_counter() - start)
    return found


def measure(method: str, device: torch.device, args: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(0)
    model = resnet34().to(device)
    optimizer = find(method).build(model.parameters(), weight_decay=args.weight_decay)
    images = torch.randn(args.batch, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (args.batch,), device=device)
    precision = torch.autocast(device.type, torch.bfloat16) if args.amp else nullcontext()

    def step() -> None:
        with precision:
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    timed(step, device, 3)
    steps = timed(step, device, args.steps)
    # 'every' out of reach: measured by hand below, so that steps and probes are timed apart
    probe = StepsizeProbe(optimizer, model.named_parameters(), every=10**9, weights_only=args.weights_only)
    timed(probe.measure, device, 2)
    before = _allocated(device)
    probes = timed(probe.measure, device, args.probes)
    a_step, a_probe = statistics.median(steps), statistics.median(probes)
    assert probe.last is not None
    return {
        "optimizer": method,
        "layers": probe.last.across.layers,
        "elements": probe.last.across.elements,
        "step_ms": 1e3 * a_step,
        "probe_ms": 1e3 * a_probe,
        "share": a_probe / (args.every * a_step),
        "peak_temporary_mib": None if before is None else (torch.cuda.max_memory_allocated() - before) / 2**20,
        "n_steps": len(steps),
        "n_probes": len(probes),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--optimizers", nargs="+", default=["aida", "adabelief", "adam"], help="names of the catalog")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--amp", action="store_true", help="forward and backward in bf16, for a faster step")
    parser.add_argument("--weights-only", action="store_true", help="probe weights only: 36 of 110 tensors")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--steps", type=int, default=50, help="training steps to time")
    parser.add_argument("--probes", type=int, default=20, help="measurements to time")
    parser.add_argument("--out", type=Path, help="write the numbers and the machine as JSON")
    args = parser.parse_args()

    device = torch.device(args.device)
    rows = [measure(method, device, args) for method in args.optimizers]
    for row in rows:
        print(
            f"{row['optimizer']:15} step {row['step_ms']:8.2f} ms   probe {row['probe_ms']:8.2f} ms   "
            f"at every={args.every}: {row['share']:.2%} of the run   "
            f"({row['layers']} layers, {row['elements']:,} elements, n = {row['n_steps']}, {row['n_probes']})"
        )
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": describe(device), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
