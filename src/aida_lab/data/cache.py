"""Cache files beside the data, for results that take long to compute and are the same for every run."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from aida_lab.runs.files import SideFile, StoreError

Content = Mapping[str, Any]


def cached(path: Path, form: int, origin: str, what: str, compute: Callable[[], Content]) -> Content:
    """The plain values and tensors in the file; computed and written if it is missing, damaged, or out of date.

    ``form`` is the version of its format, ``origin`` describes everything that the content depends on. If the file
    cannot be written, for example in a read-only data root, warn that ``what`` cannot be cached.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(stored, dict) and stored.get("format") == form and stored.get("origin") == origin:
            return stored
    except FileNotFoundError:
        pass
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        warnings.warn(f"{path} cannot be read ({type(error).__name__}) and is computed again", stacklevel=4)
    content = compute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # several processes may write at once: each its own file, so that a reader sees a complete file or none
        with SideFile(path) as side:
            torch.save({"format": form, "origin": origin, **content}, cast("IO[bytes]", side))
            side.publish()
    except (OSError, StoreError) as error:
        warnings.warn(f"{what} cannot be cached at {path}: {error}", stacklevel=4)
    return content
