"""Moments that take minutes to compute and are the same for every run: kept in a file beside the data."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from aida.lab.frechet.moments import Moments

#: Changes with the form of the file, and with how images are prepared for a network.
_FORMAT = 1


def cached_moments(path: Path, origin: str, compute: Callable[[], Moments]) -> Moments:
    """What the file holds, if it is of ``origin``; else what ``compute`` gives, and the file holds it afterwards.

    ``origin`` describes all that the moments depend on. Several processes may do so at once: each writes a file of
    its own and renames it, so that a reader sees a whole one or none.
    """
    found = _read(path, origin)
    if found is None:
        found = compute()
        _write(found, path, origin)
    return found


def _read(path: Path, origin: str) -> Moments | None:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        warnings.warn(f"{path} cannot be read ({type(error).__name__}) and is made again", stacklevel=3)
        return None
    if not isinstance(stored, dict) or stored.get("format") != _FORMAT or stored.get("origin") != origin:
        return None
    mean: Tensor = stored["mean"]
    return Moments(int(stored["count"]), mean, stored["scatter"])


def _write(found: Moments, path: Path, origin: str) -> None:
    stored = {"format": _FORMAT, "origin": origin, "count": found.count, "mean": found.mean, "scatter": found.scatter}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(stored, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # a data root that others own: the next run computes them again
        warnings.warn(f"the features of the real images cannot be kept at {path}: {error}", stacklevel=3)
        with suppress(OSError):
            partial.unlink()
