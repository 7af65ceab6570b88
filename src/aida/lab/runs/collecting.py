"""The records of finished runs brought together: all that a report reads, and no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aida.lab.runs.files import StoreError, write_whole, writing
from aida.lab.runs.records import CURVE, DONE, ENV, RESULT, SPEC, STEPSIZES, RunRecord, scan

#: The result last: a folder without it is not taken for a finished run.
_KEPT = (SPEC, ENV, CURVE, STEPSIZES, RESULT)


@dataclass(frozen=True)
class Collected:
    """What a collection did."""

    added: tuple[Path, ...]
    #: Already there, with the same result.
    known: int
    #: Not finished, or damaged.
    left: tuple[RunRecord, ...]
    #: Of what was added.
    size: int


def collect(roots: list[Path], out: Path) -> Collected:
    """Copy the records of every finished run below ``roots`` into ``out``; StoreError where two results differ."""
    added: list[Path] = []
    left: list[RunRecord] = []
    known = size = 0
    for record in (record for root in roots for record in scan(root)):
        if record.state not in DONE:
            left.append(record)
            continue
        target = out / record.path.name
        if (target / RESULT).exists():
            if (target / RESULT).read_bytes() != (record.path / RESULT).read_bytes():
                raise StoreError(
                    f"{record.path} and {target} are one spec with two results: runs on different machines or "
                    "devices, or with another number of threads; "
                    "keep one of them, or collect them into different folders"
                )
            known += 1
            continue
        with writing(target):
            target.mkdir(parents=True, exist_ok=True)
        for name in _KEPT:
            source = record.path / name
            if source.exists():
                content = source.read_bytes()
                write_whole(target / name, content)
                size += len(content)
        added.append(target)
    return Collected(tuple(added), known, tuple(left), size)
