"""What takes long to make and is the same for every run: kept in a file beside the data.

Plain values and tensors, read with ``weights_only``. Several processes may write at once: each writes a file of its
own and renames it, so that a reader sees a whole one or none.
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


def read_kept(path: Path, form: int, origin: str) -> Mapping[str, Any] | None:
    """What the file holds; None where there is none, or one of another ``form`` or of another ``origin``.

    ``origin`` describes all that its content depends on.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        warnings.warn(f"{path} cannot be read ({type(error).__name__}) and is made again", stacklevel=4)
        return None
    if not isinstance(stored, dict) or stored.get("format") != form or stored.get("origin") != origin:
        return None
    return stored


def keep(content: Mapping[str, Any], path: Path, form: int, origin: str, what: str) -> None:
    """Write it, or warn that ``what`` cannot be kept: in a data root that others own the next run makes it again."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"format": form, "origin": origin, **content}, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"{what} cannot be kept at {path}: {error}", stacklevel=4)
        with suppress(OSError):
            partial.unlink()
