"""Collect the records of finished runs in one archive per experiment: all that a report reads, and no weights."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from aida_lab.runs import files
from aida_lab.runs.archives import SUFFIX, pack
from aida_lab.runs.files import StoreError, one_line, writing
from aida_lab.runs.records import CURVE, DONE, ENV, RESULT, SPEC, STEPSIZES, scan


@dataclass(frozen=True)
class Collected:
    """What a collection did."""

    added: tuple[Path, ...]
    known: int  #: number of runs that were there before, with the same result
    left: tuple[tuple[Path, str], ...]  #: what was left out, each with the reason
    size: int  #: bytes of the added records, before compression


def collect(roots: list[Path], out: Path) -> Collected:
    """Add every finished run below ``roots`` to ``out/<experiment>.tar.xz``; an archive is replaced whole or not."""
    added: list[Path] = []
    left: list[tuple[Path, str]] = []
    known = size = 0
    archives: dict[Path, dict[str, bytes]] = {}
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with files.alone(out):
        files.remove_leftovers(out)
        there = {each.path.name: (each.path, each.result) for each in scan(out) if each.state in DONE}
        for record in (record for root in roots for record in scan(root)):
            path, key = record.path, record.path.name
            if record.spec is None or record.state not in DONE:
                left.append((path, f"{record.state}: {record.problem}" if record.problem else record.state))
                continue
            place, result = there.setdefault(key, (out / _file_name(record.spec.experiment) / key, None))
            if result is not None:
                known += result == record.result
                left += [] if result == record.result else [(path, f"the same spec as {place} {_TWO_RESULTS}")]
                continue
            try:
                packed = archives.setdefault(place.parent, _files_of(place.parent))
            except StoreError as error:
                left.append((path, f"not added: {one_line(error)}"))
                continue
            found, problems = _read(path)
            packed.update(found)
            left += problems
            size += sum(map(len, found.values()))
            added.append(place)
            there[key] = (place, record.result)
        try:
            for archive, packed in archives.items():
                files.write_whole(archive, pack(packed))
        except ValueError as error:
            raise StoreError(f"cannot write {archive}: {error}; collect some of the runs to another --out") from None
    return Collected(tuple(added), known, tuple(left), size)


_TWO_RESULTS = (
    "with another result: run on different machines or devices, or with another number of threads; keep one of "
    "them, or collect them into different folders"
)


def _file_name(experiment: str) -> str:
    """A name from a spec, which anybody may have written, as the name of a file."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", experiment) + SUFFIX


def _files_of(archive: Path) -> dict[str, bytes]:
    return dict(files.read_archive(archive)) if os.path.lexists(archive) else {}


def _read(run: Path) -> tuple[dict[str, bytes], list[tuple[Path, str]]]:
    """The files of a run by their names in an archive, and why others are not among them."""
    found, problems = {}, []
    for path in (run / name for name in (SPEC, ENV, CURVE, STEPSIZES, RESULT)):
        try:
            if (content := files.read_regular(path, files.STEPSIZES_LIMIT)) is not None:
                found[f"{run.name}/{path.name}"] = content
        except StoreError as error:  # noqa: PERF203 - five files
            problems.append((path, f"not copied: {one_line(str(error).removeprefix(f'{path} '))}"))
    return found, problems
