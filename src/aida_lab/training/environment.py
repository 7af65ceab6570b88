"""What decides a run's numbers besides its spec: the machine, the data, the code of an optimizer outside the catalog.

This chooses the device, configures torch, and records what a run was trained with. A run whose data or code changed is
trained again; one that is resumed on another machine says so.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from aida._version import __version__
from aida_lab import distributed
from aida_lab.data.local import checksum
from aida_lab.data.sets import find
from aida_lab.experiments import find_experiment
from aida_lab.external import source_of
from aida_lab.spec import RunSpec


def choose_device(asked: str | None) -> torch.device:
    """The given device; by default a GPU if there is one."""
    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(asked)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device {asked}: torch {torch.__version__} sees no CUDA device; use --device cpu")
        # not torch.cuda.current_device(): it initializes CUDA, which a process that only starts workers should not
        return torch.device("cuda", device.index or 0)
    return device


def set_up(spec: RunSpec, device: torch.device, threads: int | None) -> None:
    """Set precision, determinism and threads for the run. In torch these settings are process-wide."""
    if threads is not None:
        torch.set_num_threads(threads)
    # under bf16, what autocast leaves in float32 (the recurrence of an LSTM) may use tensor cores, too
    tf32 = spec.precision in ("tf32", "bf16", "bf16-true")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # cuDNN's benchmark mode may choose other algorithms in every run
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if spec.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(spec.deterministic)


def describe(device: torch.device, path: str, at_once: int = 1) -> dict[str, Any]:
    """The environment, recorded with the run; ``at_once`` is how many runs share the machine."""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine(),
        "device_type": device.type,
        "path": path,
        "threads": torch.get_num_threads(),
        "processes": distributed.world(),
        "at_once": at_once,
        "git": _commit(),
        "versions": {
            "aida": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if gpu else None,
            "triton": _version("triton"),
        },
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between two sessions of a run, as (before, now). What the first did not record is not compared."""
    old, new = _compared(before), _compared(now)
    if now["device_type"] != "cpu":
        del old["threads"]
    return {name: (value, new[name]) for name, value in old.items() if value is not None and value != new[name]}


def _compared(session: Mapping[str, Any]) -> dict[str, Any]:
    """What may change a run's numbers if it differs when the run is resumed."""
    versions, others = session.get("versions"), ("device", "processes", "threads")
    torch_version = versions.get("torch") if isinstance(versions, Mapping) else None
    return {"torch": torch_version, "code": session.get("git"), **{name: session.get(name) for name in others}}


def provenance(spec: RunSpec, data_root: Path | None) -> dict[str, Any]:
    """Checksums of a run's data and of its optimizer's code, recorded with the run."""
    reads = find_experiment(spec.experiment).reads(spec.variant)
    found: dict[str, Any] = {"data": {name: checksum(find(name), data_root) for name in reads}}
    if ":" in spec.optimizer:
        found["source"] = source_of(spec.optimizer)
    return found


def changed_since(spec: RunSpec, sessions: Sequence[Mapping[str, Any]], data_root: Path | None) -> str:
    """Which data or code changed since a run's last session, in words; empty if none did, or if it is not recorded."""
    before = _named(spec, sessions[-1]) if sessions else {}
    if not before:
        return ""
    now = _named(spec, provenance(spec, data_root))
    changed = [name for name in before if name in now and before[name] != now[name]]
    return "; ".join(f"{name} was changed since ({before[name]} before, {now[name]} now)" for name in changed)


def _named(spec: RunSpec, session: Mapping[str, Any]) -> dict[str, Any]:
    """The checksums in a session, by the name of the data set or of the optimizer."""
    data = session.get("data")
    found = {**(data if isinstance(data, dict) else {}), spec.optimizer: session.get("source")}
    return {name: value for name, value in found.items() if value is not None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _commit() -> str | None:
    """The commit of this checkout, with a + if files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)  # fails if installed inside another checkout
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True, timeout=10)
    return done.stdout.strip()
