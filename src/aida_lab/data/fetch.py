"""Bringing a data set under the data root: from its official address, or from a local copy.

Files are gathered in a folder beside the final one, checked there, and renamed into place together: a
set that is there is whole.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import IO, cast

from aida_lab.data.download import Patience, Progress, download
from aida_lab.data.errors import DataError
from aida_lab.data.local import RECEIPT, Receipt, Status, images_below, md5_of, mend, require, status_of
from aida_lab.data.root import data_root
from aida_lab.data.sets import DataSet, Download

_ARCHIVES = (".tar.gz", ".tgz")

#: More bytes than any archive of ours holds, what is not of the set included; a few megabytes may unpack to as much.
_MOST = 1 << 29


def get(
    data: DataSet,
    root: str | os.PathLike[str] | None = None,
    *,
    again: bool = False,
    progress: Progress | None = None,
    patience: Patience | None = None,
) -> Status:
    """Fetch a set, unless it is there and whole. A download that broke off is continued.

    ``again`` fetches it all the same, say to put the official files in the place of a copy that is not verified.
    """
    before = status_of(data, root)
    if before.data.embedded or (before.state in ("verified", "not verified") and not again):
        return before
    if not data.ways:
        raise DataError(f"{data.title} has no public address, {data.page} says how to get it; then: {mend(data, root)}")
    there = data_root(root)
    store = there / ".downloads" / data.name
    failures = []
    with _writing(there), _alone(store, data):
        for way in data.ways:
            try:
                for source in way:
                    if not (store / source.file_name).exists():
                        download(source, store / source.file_name, progress=progress, patience=patience)
            except DataError as error:
                failures.append(str(error))
                continue
            try:
                verified = _install_from(data, there, [store / source.file_name for source in way], way)
            finally:
                shutil.rmtree(store)  # whole downloads that hold the wrong thing must not be used again
            return status_of(data, root, verified)
    raise DataError(f"{data.title} could not be fetched: {'; '.join(failures)}; try again with: {mend(data, root)}")


def import_from(data: DataSet, path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> Status:
    """Take a set from a local copy: a folder that holds its files, or an official archive."""
    path, there = Path(path).expanduser().absolute(), data_root(root)
    if data.embedded:
        raise DataError(f"{data.title}: nothing is to be imported")
    if not path.exists():
        raise DataError(f"{data.title}: there is no {path} to import")
    verified = False
    with _writing(there), _alone(there / ".downloads" / data.name, data):
        if data.tree is not None:
            _import_tree(data, path, there)
        elif path.is_dir():
            _install(data, there, str(path), False, lambda to: _copy_files(data, path, to))
        elif path.name.endswith(_ARCHIVES):
            verified = _install_from(data, there, [path], ())
        else:
            names = ", ".join(file.name for file in data.files)
            raise DataError(f"{data.title}: {path} is neither a folder that holds {names} nor a .tar.gz with them")
        shutil.rmtree(there / ".downloads" / data.name, ignore_errors=True)
    return status_of(data, root, verified)


def _install_from(data: DataSet, there: Path, packed: list[Path], way: tuple[Download, ...]) -> bool:
    """Install from downloads, or from an archive; returns whether it was the official one."""
    published = {source.md5 for each in data.ways for source in each if source.md5}
    verified = all(source.md5 for source in way) if way else md5_of(packed[0]) in published
    source = ", ".join(each.address for each in way) or str(packed[0])

    def fill(to: Path) -> None:
        for path in packed:
            _unpack(data, path, to)

    _install(data, there, source, verified, fill)
    return verified


def _install(data: DataSet, there: Path, source: str, verified: bool, fill: Callable[[Path], None]) -> None:
    """Fill a folder, check it, and put it in the place of whatever is there."""
    # a root of its own for the new folder, so that the checks of a set that is there judge it unchanged
    staging = there / ".downloads" / f"{data.name}.new"
    shutil.rmtree(staging, ignore_errors=True)
    made = staging / data.folder
    made.mkdir(parents=True)
    try:
        fill(made)
        sums = _checked(data, made, source)
        covered = verified or (bool(data.files) and all(file.md5 for file in data.files))
        receipt = Receipt(source, covered, sums)
        (made / RECEIPT).write_text(json.dumps(asdict(receipt), indent=1) + "\n", encoding="utf-8")
        require(data, staging)
        _swap(made, there / data.folder, staging / "old")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _checked(data: DataSet, folder: Path, source: str) -> dict[str, str]:
    """The MD5 of every file, each compared with what is known of it."""
    sums = {}
    for file in data.files:
        path, what = folder / file.name, f"{data.title}: {file.name} of {source}"
        if not path.exists():
            raise DataError(f"{data.title}: {source} holds no {file.name}")
        if (size := path.stat().st_size) != file.size:
            raise DataError(f"{what} has {size:,} bytes where {file.size:,} belong; nothing was kept")
        sums[file.name] = md5_of(path)
        if file.md5 not in (None, sums[file.name]):
            raise DataError(f"{what} has MD5 {sums[file.name]} where {file.md5} is published; nothing was kept")
    return sums


def _swap(new: Path, place: Path, aside: Path) -> None:
    # two renames, since a folder cannot be renamed over one that is not empty: a kill between them leaves none,
    # and the next command installs it again
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        place.rename(aside)
    new.rename(place)


def _copy_files(data: DataSet, source: Path, to: Path) -> None:
    """Copy from the folder of the set, or from a folder that holds that folder."""
    if (source / data.folder).is_dir():
        source = source / data.folder
    for name in [*(file.name for file in data.files), *data.derived]:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)
        elif (source / f"{name}.gz").is_file():
            _unpack(data, source / f"{name}.gz", to)


def _import_tree(data: DataSet, path: Path, there: Path) -> None:
    assert data.tree is not None
    for split, wanted in data.tree.images.items():
        found = images_below(path / split) if (path / split).is_dir() else 0
        if found != wanted:
            raise DataError(
                f"{data.title}: {path / split} holds {found:,} images in class folders where {wanted:,} belong"
            )
    if not data.linked:
        _install(data, there, str(path), False, lambda to: _copy_tree(data, path, to))
        return
    place = there / data.folder
    if place.exists() and not place.is_symlink():
        raise DataError(f"{data.title}: {place} is a folder, not a link to a copy; move it away first")
    fresh = there / ".downloads" / data.name / "link"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(path, target_is_directory=True)
    fresh.replace(place)


def _copy_tree(data: DataSet, path: Path, to: Path) -> None:
    assert data.tree is not None
    for split in data.tree.images:
        shutil.copytree(path / split, to / split)


def _unpack(data: DataSet, packed: Path, to: Path) -> None:
    sizes = {file.name: file.size for file in data.files}
    name = packed.name.removesuffix(".gz")
    try:
        if packed.name.endswith(_ARCHIVES):
            # no path of the archive is ever used as a path: regular members are written under names of ours
            with gzip.open(packed) as plain, _tar(_Bounded(plain, packed, _MOST)) as archive:
                for member in archive:
                    name = PurePosixPath(member.name).name
                    if member.isreg() and name in sizes and (content := archive.extractfile(member)) is not None:
                        _write(content, to / name, f"{packed}, {name},", sizes[name])
        elif packed.name.endswith(".gz"):
            with gzip.open(packed) as plain:
                _write(plain, to / name, packed, sizes.get(name, _MOST))
        else:
            shutil.copyfile(packed, to / packed.name)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{data.title}: {packed} cannot be unpacked ({error})") from None


class _Bounded:
    """What comes out of a packed file, up to so many bytes; a DataError beyond them."""

    def __init__(self, stream: io.BufferedIOBase | IO[bytes], what: object, most: int) -> None:
        self._stream, self._what, self._most, self._left = stream, what, most, most

    def read(self, size: int = -1, /) -> bytes:
        piece = self._stream.read(size if 0 <= size <= self._left else self._left + 1)
        self._left -= len(piece)
        if self._left < 0:
            raise DataError(f"{self._what} unpacks to more than the {self._most:,} bytes that belong; nothing was kept")
        return piece


def _tar(stream: _Bounded) -> tarfile.TarFile:
    return tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|")


def _write(content: io.BufferedIOBase | IO[bytes], to: Path, what: object, most: int) -> None:
    with content, to.open("wb") as out:
        shutil.copyfileobj(_Bounded(content, what, most), out, 1 << 20)


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """What the file system refuses, as a line."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write below {root}: {error}; --data or AIDA_DATA names another folder") from None


@contextmanager
def _alone(store: Path, data: DataSet) -> Iterator[None]:
    """Let one process at a time bring a set; the lock goes with the process, however it ends."""
    store.mkdir(parents=True, exist_ok=True)
    with (store.parent / f"{data.name}.lock").open("w") as lock:
        try:
            import fcntl
        except ImportError:  # Windows: there the second writer fails at the rename
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{data.title} is being brought by another process; wait for it, then try again") from None
        yield
