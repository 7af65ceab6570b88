"""Download or import a data set into the data root.

Files are collected in a staging folder, checked there, and renamed into place together. So a data set that is there is
complete.
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

from aida_lab.data.download import Progress, RetryPolicy, download
from aida_lab.data.errors import DataError
from aida_lab.data.local import RECEIPT, Receipt, Status, fix_command, images_below, md5_of, require, status_of
from aida_lab.data.root import data_root
from aida_lab.data.sets import DataSet, Download

_ARCHIVES = (".tar.gz", ".tgz")

#: Limit on the unpacked size of an archive, against decompression bombs. All archives of the data sets are smaller.
_MAX_UNPACKED = 1 << 29


def get(
    data: DataSet,
    root: str | os.PathLike[str] | None = None,
    *,
    again: bool = False,
    progress: Progress | None = None,
    retry: RetryPolicy | None = None,
) -> Status:
    """Download a data set unless a complete one is there. Resumes an interrupted download.

    ``again`` downloads it anyway, for example to replace an unverified copy by the official files.
    """
    before = status_of(data, root)
    if before.data.embedded or (before.state in ("verified", "not verified") and not again):
        return before
    if not data.mirrors:
        fix = fix_command(data, root)
        raise DataError(f"{data.title} has no public address; get it as {data.page} says, then run: {fix}")
    there = data_root(root)
    store = there / ".downloads" / data.name
    failures = []
    with _writing(there), _locked(store, data):
        for mirror in data.mirrors:
            try:
                for source in mirror:
                    if not (store / source.file_name).exists():
                        download(source, store / source.file_name, progress=progress, retry=retry)
            except DataError as error:
                failures.append(str(error))
                continue
            try:
                verified = _install_from(data, there, [store / source.file_name for source in mirror], mirror)
            finally:
                shutil.rmtree(store)  # a complete download with wrong content must not be used again
            return status_of(data, root, verified)
    fix = fix_command(data, root)
    raise DataError(f"{data.title} could not be downloaded: {'; '.join(failures)}; try again with: {fix}")


def import_from(data: DataSet, path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> Status:
    """Import a data set from a local copy: a folder with its files, or the official archive."""
    path, there = Path(path).expanduser().absolute(), data_root(root)
    if data.embedded:
        raise DataError(f"{data.title}: comes with a package and needs no import")
    if not path.exists():
        raise DataError(f"{data.title}: {path} does not exist; give the path of your copy")
    verified = False
    with _writing(there), _locked(there / ".downloads" / data.name, data):
        if data.tree is not None:
            _import_tree(data, path, there)
        elif path.is_dir():
            _install(data, there, str(path), False, lambda to: _copy_files(data, path, to))
        elif path.name.endswith(_ARCHIVES):
            verified = _install_from(data, there, [path], ())
        else:
            names = ", ".join(file.name for file in data.files)
            raise DataError(f"{data.title}: {path} is neither a folder with {names} nor a .tar.gz of them")
        shutil.rmtree(there / ".downloads" / data.name, ignore_errors=True)
    return status_of(data, root, verified)


def _install_from(data: DataSet, there: Path, packed: list[Path], mirror: tuple[Download, ...]) -> bool:
    """Install from downloads or from an archive. Returns whether published checksums cover it."""
    published = {source.md5 for each in data.mirrors for source in each if source.md5}
    verified = all(source.md5 for source in mirror) if mirror else md5_of(packed[0]) in published
    source = ", ".join(each.url for each in mirror) or str(packed[0])

    def fill(to: Path) -> None:
        for path in packed:
            _unpack(data, path, to)

    _install(data, there, source, verified, fill)
    return verified


def _install(data: DataSet, there: Path, source: str, verified: bool, fill: Callable[[Path], None]) -> None:
    """Fill a staging folder, check it, and replace the installed folder by it."""
    # the staging folder is a data root of its own, so that require() checks it as it checks an installed set
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
    """The MD5 of every file. DataError if a file is missing or differs from its known size or MD5."""
    sums = {}
    for file in data.files:
        path, what = folder / file.name, f"{data.title}: {file.name} of {source}"
        if not path.exists():
            raise DataError(f"{data.title}: {source} does not contain {file.name}")
        if (size := path.stat().st_size) != file.size:
            raise DataError(f"{what} has {size:,} bytes instead of {file.size:,}; nothing was kept")
        sums[file.name] = md5_of(path)
        if file.md5 not in (None, sums[file.name]):
            raise DataError(f"{what} has MD5 {sums[file.name]} instead of the published {file.md5}; nothing was kept")
    return sums


def _swap(new: Path, place: Path, aside: Path) -> None:
    # Two renames, because a folder cannot replace a folder that is not empty. If the process is killed between them,
    # no folder is left and the next command installs it again.
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        place.rename(aside)
    new.rename(place)


def _copy_files(data: DataSet, source: Path, to: Path) -> None:
    """Copy from the folder of the data set, or from its parent."""
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
            raise DataError(f"{data.title}: {path / split} has {found:,} images in class folders instead of {wanted:,}")
    if not data.linked:
        _install(data, there, str(path), False, lambda to: _copy_tree(data, path, to))
        return
    place = there / data.folder
    if place.exists() and not place.is_symlink():
        raise DataError(f"{data.title}: {place} is a folder, not a symbolic link; move it away first")
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
            # paths in the archive are never used: regular members are written under the names in data.files
            with (
                gzip.open(packed) as plain,
                tarfile.open(fileobj=cast("IO[bytes]", _Bounded(plain, packed, _MAX_UNPACKED)), mode="r|") as archive,
            ):
                for member in archive:
                    name = PurePosixPath(member.name).name
                    if member.isreg() and name in sizes and (content := archive.extractfile(member)) is not None:
                        _write(content, to / name, f"{packed}, {name},", sizes[name])
        elif packed.name.endswith(".gz"):
            with gzip.open(packed) as plain:
                _write(plain, to / name, packed, sizes.get(name, _MAX_UNPACKED))
        else:
            shutil.copyfile(packed, to / packed.name)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{data.title}: {packed} cannot be unpacked ({error})") from None


class _Bounded:
    """A stream that raises a DataError after more than ``most`` bytes."""

    def __init__(self, stream: io.BufferedIOBase | IO[bytes], what: object, most: int) -> None:
        self._stream, self._what, self._most, self._left = stream, what, most, most

    def read(self, size: int = -1, /) -> bytes:
        chunk = self._stream.read(size if 0 <= size <= self._left else self._left + 1)
        self._left -= len(chunk)
        if self._left < 0:
            raise DataError(f"{self._what} unpacks to more than the expected {self._most:,} bytes; nothing was kept")
        return chunk


def _write(content: io.BufferedIOBase | IO[bytes], to: Path, what: object, most: int) -> None:
    with content, to.open("wb") as out:
        shutil.copyfileobj(_Bounded(content, what, most), out, 1 << 20)


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Turn an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write below {root}: {error}; --data or AIDA_DATA names another folder") from None


@contextmanager
def _locked(store: Path, data: DataSet) -> Iterator[None]:
    """Hold a lock on the data set. The system releases it when the process ends."""
    store.mkdir(parents=True, exist_ok=True)
    with (store.parent / f"{data.name}.lock").open("w") as lock:
        try:
            import fcntl
        except ImportError:  # Windows: the second writer fails at the rename
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{data.title} is being installed by another process; try again later") from None
        yield
