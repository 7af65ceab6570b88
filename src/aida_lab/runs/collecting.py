"""The records of finished runs brought together: all that a report reads, and no weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from aida_lab.runs.files import (
    STEPSIZES_LIMIT,
    StoreError,
    alone,
    check_no_links,
    one_line,
    read_regular,
    remove_leftovers,
    write_whole,
    writing,
)
from aida_lab.runs.records import CURVE, DONE, ENV, RESULT, SPEC, STEPSIZES, RunRecord, scan

#: The result last: a folder without it is not taken for a finished run.
_KEPT = (SPEC, ENV, CURVE, STEPSIZES, RESULT)


@dataclass(frozen=True)
class Collected:
    """What a collection did."""

    added: tuple[Path, ...]
    #: Already there, with the same result.
    known: int
    #: Folders that were left out, each with the reason.
    left: tuple[tuple[Path, str], ...]
    #: Of what was added.
    size: int


def collect(roots: list[Path], out: Path) -> Collected:
    """Copy the records of every finished run below ``roots`` into ``out``."""
    added: list[Path] = []
    left: list[tuple[Path, str]] = []
    known = size = 0
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with alone(out):
        for record in (record for root in roots for record in scan(root)):
            target = out / record.path.name
            try:
                files = _files(record, target)
            except _LeftOutError as reason:
                left.append((record.path, str(reason)))
                continue
            if files is None:
                known += 1
                continue
            with writing(target):
                target.mkdir(exist_ok=True)
            for name, content in files.items():
                if isinstance(content, bytes):
                    write_whole(target / name, content)
                    size += len(content)
                elif content is not None:
                    left.append((record.path / name, f"not copied: {content}"))
            added.append(target)
    return Collected(tuple(added), known, tuple(left), size)


class _LeftOutError(Exception):
    """Why a run is not collected."""


def _files(record: RunRecord, target: Path) -> dict[str, bytes | str | None] | None:
    """What is to be copied, by name: bytes, or why there are none; None if the run is there already."""
    if record.state not in DONE:
        raise _LeftOutError(f"{record.state}: {record.problem}" if record.problem else record.state)
    files = {name: _content(record.path / name) for name in _KEPT}
    try:
        there = read_regular(target / RESULT)
        if there is not None:
            if there != files[RESULT]:
                raise _LeftOutError(
                    f"the same spec as {target} with another result: run on different machines or devices, or "
                    "with another number of threads; keep one of them, or collect them into different folders"
                )
            return None
        if os.path.lexists(target):
            check_no_links(target)
            remove_leftovers(target)  # of a collection that was killed
    except StoreError as error:
        raise _LeftOutError(one_line(error)) from None
    return files


def _content(path: Path) -> bytes | str | None:
    try:
        return read_regular(path, STEPSIZES_LIMIT)
    except StoreError as error:
        return one_line(str(error).removeprefix(f"{path} "))
