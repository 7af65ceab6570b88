"""Time the step of Aida and AdamW on the same sharded parameters (DTensors), side by side in one run.

    python benchmarks/sharded_step.py --device cpu --ranks 2      # gloo; starts the ranks itself
    python benchmarks/sharded_step.py --device cuda               # one NCCL rank

Parameters and gradients are sharded along their first dimension, as FSDP2 does it. Tables of rank 0 go to stdout,
progress to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from clock import Place
from contest import Round
from machine import describe
from results import Entry, Workload
from rivals import AIDA_CLIP, AIDA_FUSED, BASELINE, CLIP_BASELINE, RIVALS
from shapes import MODELS, Shapes
from tables import markdown

SMALL = "small"
COMPARED = (BASELINE, CLIP_BASELINE, AIDA_FUSED, AIDA_CLIP)
MODES = {"cpu": ("host", "eager"), "cuda": ("host", "eager", "queued", "graph")}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, help="processes; default: 2 on a CPU, 1 on a GPU")
    parser.add_argument(
        "--models", nargs="+", choices=(SMALL, "gpt2", "gpt-1.3b"), default=[SMALL, "gpt2"],
        help="small: 300 tensors of 64 x 64; default: small and gpt2",
    )  # fmt: skip
    parser.add_argument(
        "--modes", nargs="+", choices=MODES["cuda"],
        help="host: time that the host spends, without waiting; eager: a step and the wait for it; queued and graph: "
        "as in step_time.py, on a GPU; default: all",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=21, help="samples of each optimizer")
    parser.add_argument("--steps", type=int, default=5, help="steps per sample, at most; eager on a CPU takes one")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every sample and what it was measured on")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="the tables that are printed")
    options = parser.parse_args(arguments)
    options.modes = options.modes or MODES[options.device]
    if not set(options.modes) <= set(MODES[options.device]):
        parser.error("--modes queued and graph need --device cuda")
    options.ranks = options.ranks or (2 if options.device == "cpu" else 1)
    return options


def shapes_of(model: str) -> Shapes:
    return [(64, 64)] * 300 if model == SMALL else MODELS[model]()


def sharded(mesh: DeviceMesh) -> Place:
    """Makes DTensors as FSDP2 does: a parameter and its gradients of all steps share one spec object."""
    specs = {}

    def place(tensor: Tensor) -> Tensor:
        placed = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        spec = specs.setdefault(tensor.shape, placed._spec)
        return DTensor(placed.to_local().clone(), spec, requires_grad=False)

    return place


def measure(options: argparse.Namespace) -> list[Entry]:
    place = sharded(init_device_mesh(options.device, (options.ranks,)))
    rivals = [rival for rival in RIVALS if rival.name in COMPARED]
    entries: list[Entry] = []
    for model in options.models:
        for mode in options.modes:
            workload = Workload(model, shapes_of(model))
            say(f"{mode}: {workload.label} on {options.ranks} ranks")
            # all ranks must do the same: no deadline, no decision by free memory
            lap = Round(mode, torch.device(options.device), options.repeats, options.steps, math.inf, say, place, True)
            entries += lap.run(rivals, [workload])
    return entries


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    """What each rank does."""
    if options.device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.ranks))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.cuda.set_device(rank)
    backend = "gloo" if options.device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    try:
        entries = measure(options)
        dist.barrier()
        if rank == 0:
            report(entries, options)
    finally:
        dist.destroy_process_group()


def report(entries: list[Entry], options: argparse.Namespace) -> None:
    machine = {**describe(torch.device(options.device)), "ranks": options.ranks}
    tables = markdown(entries, machine, None)
    print(tables)
    if options.markdown is not None:
        options.markdown.write_text(tables)
    if options.out is not None:
        record = {"machine": machine, "entries": [entry.as_json(None) for entry in entries]}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (options, folder), nprocs=options.ranks, start_method="spawn")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
