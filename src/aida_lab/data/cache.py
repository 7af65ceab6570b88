"""Cache files beside the data, for results that take long to compute and are the same for every run.

They hold plain values and tensors and are read with ``weights_only``. Several processes may write at once: each writes
its own temporary file and renames it, so a reader sees a complete file or none.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def read_cache(path: Path, form: int, origin: str) -> Mapping[str, Any] | None:
    """The content of the file; None if it is missing or has another ``form`` (format version) or ``origin``.

    ``origin`` describes everything that the content depends on.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        warnings.warn(f"{path} cannot be read ({type(error).__name__}) and is computed again", stacklevel=4)
        return None
    if not isinstance(stored, dict) or stored.get("format") != form or stored.get("origin") != origin:
        return None
    return stored


def write_cache(content: Mapping[str, Any], path: Path, form: int, origin: str, what: str) -> None:
    """Write the file. If that fails, for example in a read-only data root, warn that ``what`` cannot be cached."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"format": form, "origin": origin, **content}, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"{what} cannot be cached at {path}: {error}", stacklevel=4)
        with suppress(OSError):
            partial.unlink()
