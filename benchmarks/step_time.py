"""Time the optimizer step of Aida and its rivals side by side, in one run.

    python benchmarks/step_time.py --device cuda --out step_time.json --markdown step_time.md

Needs torch and aida alone; rivals that are not installed are listed as such. Gradients lie elsewhere
at every eager step, as after ``zero_grad()`` and a backward pass; a CUDA graph has fixed addresses by
its nature. Tables go to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from clock import copy_bandwidth
from contest import Round
from machine import describe
from results import Entry, Workload
from rivals import LOW_PRECISION_RIVALS, RIVALS, Rival
from shapes import MODELS, many_tensors
from tables import markdown

#: The workload of many small groups, which --models may name as well.
MANY_GROUPS = "groups"
GROUP_COUNT = 500

GPU_MODES = ("eager", "queued", "graph")

#: The 1.3B model takes 26 GB and minutes a round on a CPU: only when asked for.
DEFAULT_MODELS = {"cpu": ("resnet34", "vgg11", MANY_GROUPS), "cuda": (*MODELS, MANY_GROUPS)}


class Job(NamedTuple):
    """One round to run."""

    mode: str
    rivals: list[Rival]
    workloads: list[Workload]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--models", nargs="+", choices=(*MODELS, MANY_GROUPS), metavar="MODEL",
        help=f"any of {', '.join((*MODELS, MANY_GROUPS))}; default on a CPU: {', '.join(DEFAULT_MODELS['cpu'])}",
    )  # fmt: skip
    parser.add_argument(
        "--modes", nargs="+", choices=GPU_MODES,
        help="eager: a step and the wait for it; queued: step after step without waiting; graph: replays of a CUDA "
        "graph; default: all on a GPU, eager on a CPU",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=11, help="samples of each optimizer")
    parser.add_argument("--steps", type=int, default=50, help="steps a sample on a GPU, at most; a CPU takes one")
    parser.add_argument("--threads", type=int, help="threads on a CPU; default: torch's own choice")
    parser.add_argument("--budget-seconds", type=float, default=240.0, help="measure less rather than longer")
    parser.add_argument("--low-precision", action="store_true", help="also 8-bit and bf16 state, and bf16 parameters")
    parser.add_argument("--only", metavar="PATTERN", default="", help="optimizers whose name this expression finds")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every sample and what it was measured on")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="the tables that are printed")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here; use --device cpu")
    if options.device == "cpu" and options.modes not in (None, ["eager"]):
        parser.error("--modes queued and graph need --device cuda")
    rivals = (*RIVALS, *(LOW_PRECISION_RIVALS if options.low_precision else ()))
    options.rivals = [rival for rival in rivals if re.search(options.only, rival.name, re.IGNORECASE)]
    if not options.rivals:
        parser.error(f"--only {options.only!r} finds none of: {', '.join(rival.name for rival in rivals)}")
    options.models = options.models or DEFAULT_MODELS[options.device]
    options.modes = options.modes or (GPU_MODES if options.device == "cuda" else ("eager",))
    return options


def jobs(options: argparse.Namespace) -> list[Job]:
    rivals, found = options.rivals, []
    for model in options.models:
        for mode in options.modes:
            if model == MANY_GROUPS:
                shapes = many_tensors(GROUP_COUNT)
                workloads = [Workload("small layers", shapes, groups) for groups in (1, GROUP_COUNT)]
                found.append(Job(mode, [rival for rival in rivals if rival.grouped], workloads))
            else:
                found.append(Job(mode, rivals, [Workload(model, MODELS[model]())]))
    return [job for job in found if job.rivals]


def measure(options: argparse.Namespace) -> list[Entry]:
    device = torch.device(options.device)
    end = monotonic() + options.budget_seconds
    entries: list[Entry] = []
    waiting = jobs(options)
    for index, job in enumerate(waiting):
        say(f"{job.mode}: {', '.join(workload.label for workload in job.workloads)}")
        deadline = monotonic() + (end - monotonic()) / (len(waiting) - index)
        started = monotonic()
        entries += Round(job.mode, device, options.repeats, options.steps, deadline, say).run(job.rivals, job.workloads)
        say(f"  {monotonic() - started:.1f} s")
    return entries


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    machine = describe(torch.device(options.device))
    copy_rate = copy_bandwidth(torch.device(options.device))
    entries = measure(options)
    tables = markdown(entries, machine, copy_rate)
    print(tables)
    if options.markdown is not None:
        options.markdown.write_text(tables)
    if options.out is not None:
        found = [entry.as_json(copy_rate) for entry in entries]
        record = {"machine": machine, "copy_bytes_per_second": copy_rate, "entries": found}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if any(entry.samples_ms for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
