"""Writes a report into its folder: every file atomically, old files of an earlier report removed, nothing else touched.

A report is made in a temporary folder inside the target and moved file by file. If the process is killed, each file is
either the old one or the new one. A list of the written files tells the next report which files it may remove.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aida_lab.runs.files import StoreError, alone, read_regular, writing

PAGE = "index.html"
#: The files of the report, one name per line.
LIST = ".aida-report"
_MAKING = re.compile(r"\.aida-report-\d+\.tmp")
#: Names that a report can have written. The list may be forged, so nothing else is removed.
_OURS = re.compile(r"index\.html|tables/[\w.-]+\.(?:md|tex|csv)|figures/(?:stepsizes-[\w.-]+/)?[\w.-]+\.(?:png|svg)")


@contextmanager
def publishing(out: Path) -> Iterator[Path]:
    """A temporary folder for a report. At the end its files are moved to ``out``, the page last."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with alone(out):
        for path in out.iterdir():
            if _MAKING.fullmatch(path.name):  # left by a report that was killed
                shutil.rmtree(path, ignore_errors=True)
        making = out / f"{LIST}-{os.getpid()}.tmp"
        try:
            with writing(making):
                making.mkdir()
            yield making
            with writing(out):
                _move(making, out)
        finally:
            shutil.rmtree(making, ignore_errors=True)


def _move(making: Path, out: Path) -> None:
    made = {path.relative_to(making).as_posix() for path in making.rglob("*") if path.is_file()}
    former = _listed(out)
    _list(made | former, making, out)  # first, so that a kill leaves no unlisted file
    for name in sorted(made, key=lambda name: (name == PAGE, name)):
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_within(target, out)
        os.replace(making / name, target)
    for name in sorted(former - made):
        with suppress(OSError, StoreError):  # gone already, or behind a link
            _check_within(out / name, out)
            (out / name).unlink()
            (out / name).parent.rmdir()  # refused unless it is empty
    _list(made, making, out)


def _check_within(path: Path, out: Path) -> None:
    """StoreError if a folder between ``out`` and a file of it is a link."""
    for folder in path.parents[: len(path.relative_to(out).parts) - 1]:
        if folder.is_symlink():
            raise StoreError(
                f"{folder} is a symbolic link, and links are not followed; remove it, or use another --out"
            )


def _listed(out: Path) -> set[str]:
    content = read_regular(out / LIST) or b""
    return {name for name in content.decode(errors="replace").splitlines() if _OURS.fullmatch(name)}


def _list(names: Iterable[str], making: Path, out: Path) -> None:
    (making / LIST).write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
    os.replace(making / LIST, out / LIST)
