"""Checkpoints of a run: written atomically, named by step and content hash; the last two are kept."""

from __future__ import annotations

import errno
import hashlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from aida_lab.runs.files import SideFile, StoreError, sync_folder, writing

_NAME = re.compile(r"(\d{8,})-([0-9a-f]{16})\.pt")
_KEPT = 2


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint on the disk."""

    path: Path
    step: int
    digest: str  #: the first 16 hexadecimal digits of the SHA-256 of its content, from its name

    def is_whole(self) -> bool:
        """Whether its content has the hash in its name."""
        found = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                while piece := file.read(1 << 20):
                    found.update(piece)
        except OSError as error:
            if error.errno == errno.EIO:  # a bad sector
                return False
            raise StoreError(f"checkpoint {self.path} cannot be read: {error.strerror or error}") from error
        return found.hexdigest()[:16] == self.digest


def checkpoint_files(folder: Path) -> list[CheckpointFile]:
    """The checkpoints of a run, the newest first."""
    if not folder.is_dir():
        return []
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    found = [CheckpointFile(path, int(match[1]), match[2]) for path, match in named if match]
    # a run that is stopped right after a save saves the same step again
    return sorted(found, key=lambda file: (file.step, file.path.stat().st_mtime_ns), reverse=True)


def save_checkpoint(folder: Path, content: Mapping[str, Any], step: int) -> None:
    """Write a checkpoint, then remove all but the last two. If this is interrupted, the earlier ones are whole."""
    import torch

    _check_plain(content, "checkpoint")
    with writing(folder):
        if not folder.is_dir():
            folder.mkdir()
            sync_folder(folder.parent)
    with SideFile(folder / f"{step:08d}") as side:
        torch.save(dict(content), cast("IO[bytes]", side))
        side.publish(f"{step:08d}-{side.sha256.hexdigest()[:16]}.pt")
    with writing(folder):
        for file in checkpoint_files(folder)[_KEPT:]:
            file.path.unlink()


def load_checkpoint(folder: Path, objection: Callable[[Mapping[str, Any]], str]) -> dict[str, Any] | None:
    """The newest checkpoint that is whole and without ``objection``, its tensors on the CPU; None if there is none.

    Newer ones are removed with a warning. Otherwise they would be kept instead of those that follow.
    """
    refused: list[tuple[CheckpointFile, str]] = []
    for file in checkpoint_files(folder):
        if not file.is_whole():
            warnings.warn(
                f"checkpoint {file.path} is damaged: its content does not have the hash in its name; "
                "the one before it is used, or the run starts again if there is none",
                stacklevel=3,
            )
            file.path.unlink()
            continue
        content = _read(file)
        if not (reason := objection(content)):
            for newer, why in refused:
                warnings.warn(f"checkpoint {newer.path} is not used: {why}; the one before it is", stacklevel=3)
                newer.path.unlink()
            return content
        refused.append((file, reason))
    if refused:  # whole, and perhaps days of work: only the user may delete them
        file, reason = refused[0]
        raise StoreError(
            f"checkpoint {file.path} cannot be used: {reason}. Restore that file, or remove {folder} "
            "to start the run again"
        )
    return None


def _read(file: CheckpointFile) -> dict[str, Any]:
    import torch

    try:
        content: dict[str, Any] = torch.load(file.path, map_location="cpu", weights_only=True)
    except Exception as error:
        # the bytes are those that were written, so an older checkpoint must not be used silently
        raise StoreError(
            f"checkpoint {file.path} is whole, but torch {torch.__version__} cannot read it: {error}. Use the torch "
            f"that wrote it (env.json names it), or remove {file.path.parent} to start the run again"
        ) from error
    return content


def _check_plain(value: Any, where: str) -> None:
    """TypeError for a value that ``weights_only`` loading refuses: the run could be saved and never resumed."""
    import torch

    kind = type(value)
    ours = (torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device)
    if kind in (dict, OrderedDict):
        for key, part in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(part, f"{where}[{key!r}]")
    elif kind in (list, tuple):
        for index, part in enumerate(value):
            _check_plain(part, f"{where}[{index}]")
    elif kind not in (type(None), bool, int, float, str, bytes, *ours):
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, numbers, strings, "
            "and dicts, lists and tuples of them, so that reading one runs no code"
        )
