"""Safe file access: atomic writes, bounded reads, and clear errors if the disk is full.

A run's folder may come from anybody. Only regular files in it are read or written, and no link is followed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from aida_lab import ExplainedError
from aida_lab.runs.archives import PACKED_LIMIT, SUFFIX, unpack

_TEMPORARY = ".tmp"
_LEFTOVER = re.compile(r"\..+\.\d+\.tmp")

#: Limits on the size of a file that is read, in bytes. Our largest files have a hundredth of it.
OBJECT_LIMIT, CURVE_LIMIT, STEPSIZES_LIMIT = 16 << 20, 64 << 20, 256 << 20
#: Limit on the nesting of a JSON object.
_DEPTH = 32

_KINDS = {
    stat.S_IFLNK: "a symbolic link, and links are not followed", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip

#: The remedy by error number, if there is no space left.
_NO_ROOM = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room within the quota",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}


class StoreError(ExplainedError):
    """A run's folder cannot be read or written. The message names the file, the reason and the remedy."""


@contextmanager
def writing(path: Path, wanted: int | None = None) -> Iterator[None]:
    """Turn an OSError while ``path`` is written, with ``wanted`` bytes, into a :class:`StoreError`."""
    try:
        yield
    except OSError as error:
        said = f"cannot write {path}: {error.strerror or error}"
        remedy = _NO_ROOM.get(error.errno or 0)
        if remedy is None:
            raise StoreError(f"{said}; choose a folder that can be written") from error
        if wanted is not None:
            said += f"; it takes {wanted:,} bytes"
            if error.errno == errno.ENOSPC:
                said += f" and {shutil.disk_usage(path.parent).free:,} are free"
        resumed = "and the same command resumes from it"
        raise StoreError(f"{said}. What was saved before is whole: {remedy}, {resumed}") from error


class SideFile:
    """A temporary file beside ``path``. :meth:`publish` renames it into place; otherwise it is removed.

    ``write`` never raises: it keeps the first failure for ``publish``. torch.save calls it from C++, which turns every
    exception, even KeyboardInterrupt, into a RuntimeError about positions in its archive. After a failure, bytes are
    only counted, so that the error can name the required space.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._side = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
        self._failure: BaseException | None = None
        self.sha256 = hashlib.sha256()  #: of what was written
        self.size = 0
        with writing(path):
            self._side.unlink(missing_ok=True)  # of a killed process with the same id, or a link
            descriptor = open_regular(self._side, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._file = os.fdopen(descriptor, "wb", buffering=0)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        self.size += len(view)
        if self._failure is None:
            try:
                self.sha256.update(view)
                _write_all(self._file.fileno(), view)
            except BaseException as failure:
                self._failure = failure
        return len(view)

    def flush(self) -> None:
        """Required by torch.save; nothing is buffered here."""

    def publish(self, name: str | None = None) -> None:
        """Sync it and rename it to ``path``, or to ``name`` in the same folder."""
        with writing(self._path, self.size), self:  # removed before the error is raised, so that its space is free
            if self._failure is not None:
                raise self._failure
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._side, self._path.with_name(name) if name else self._path)
            sync_folder(self._path.parent)

    def __enter__(self) -> SideFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        with suppress(OSError):
            self._side.unlink()


def write_whole(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` atomically."""
    with SideFile(path) as side:
        side.write(content)
        side.publish()


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed writers. The caller must hold the folder's lock."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            with suppress(OSError):  # does no harm if it stays
                path.unlink()


def append_line(path: Path, line: str) -> None:
    """Append a line, or nothing if there is no space for all of it."""
    content = (line + "\n").encode()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with writing(path, len(content)), open(open_regular(path, flags), "ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            _write_all(file.fileno(), memoryview(content))
        except BaseException:
            with suppress(OSError):
                file.truncate(before)
            raise


def sync(path: Path) -> int:
    """Flush a file to the disk; returns its length, 0 if it does not exist."""
    with writing(path):
        try:
            with open(open_regular(path, os.O_RDWR), "rb+") as file:
                os.fsync(file.fileno())
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return 0


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk: until then, a power failure may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. OSError for anything else; a link is not followed, a pipe does not block."""
    with suppress(FileNotFoundError):
        _check_regular(path, os.lstat(path))  # before opening, which may already act on a device
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags | careful, 0o666)
    try:
        _check_regular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"it is {_kind(found)}", str(path))


def _kind(found: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")


def check_no_links(folder: Path) -> None:
    """StoreError if a folder or one of its entries is a link, a pipe or a device, which writes would reach."""
    with writing(folder), os.scandir(folder) as entries:
        found = [(folder, os.lstat(folder)), *((Path(each), each.stat(follow_symlinks=False)) for each in entries)]
    for path, status in found:
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise StoreError(f"{path} is {_kind(status)}; remove it, or use another --out")


def read_regular(path: Path, limit: int = OBJECT_LIMIT) -> bytes | None:
    """All bytes of a file; None if there is none. StoreError if it is no regular file, or has more than ``limit``.

    A file of an archived run is named ``NAME.tar.xz/<key>/<file>``.
    """
    if is_archive(path.parent.parent):
        packed = read_archive(path.parent.parent).get(f"{path.parent.name}/{path.name}")
        _check_size(path, len(packed or b""), limit)
        return packed
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size + 1) if size <= limit else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    _check_size(path, max(size, len(content)), limit)
    return content


def _check_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise StoreError(f"{path} has {size:,} bytes; at most {limit:,} are read")


def is_archive(path: Path) -> bool:
    """Whether runs are read from a file of this name."""
    return path.name.endswith(SUFFIX) and os.path.lexists(path) and not path.is_dir()


def file_exists(path: Path) -> bool:
    """Whether a run has this file, of whatever kind, on the disk or in an archive."""
    archive = path.parent.parent
    return f"{path.parent.name}/{path.name}" in read_archive(archive) if is_archive(archive) else os.path.lexists(path)


def read_archive(path: Path) -> Mapping[str, bytes]:
    """The files in an archive of runs, by ``<key>/<file>``. StoreError if it cannot be read whole."""
    found = os.lstat(path)
    return _archived(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=16)
def _archived(path: Path, version: tuple[int, ...]) -> Mapping[str, bytes]:
    try:
        return unpack(read_regular(path, PACKED_LIMIT) or b"")
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from None


def parse_json(content: bytes) -> Any:
    """The value of a JSON text; ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file, :class:`StoreError` if it holds something else."""
    content = read_regular(path)
    if content is None:
        return None
    try:
        value = parse_json(content)
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
        if _nested(value) > _DEPTH:
            raise ValueError(f"it is nested more than {_DEPTH} levels deep")
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    return value


def _nested(value: Any) -> int:
    depth, level = 0, [value]
    while level and depth <= _DEPTH:
        depth += 1
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level = [each for part in parts for each in part]
    return depth


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder; other processes wait."""
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):  # a system, or a file system, without locks
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def json_text(value: Any, *, indent: int | None = None, sort: bool = False) -> str:
    """Strict JSON: numbers that are not finite become null."""
    return json.dumps(in_json(value, lambda number: None), indent=indent, sort_keys=sort, allow_nan=False)


def in_json(value: Any, replaced: Callable[[float], str | None] = str) -> Any:
    """``value`` for strict JSON. Numbers that are not finite are replaced, by default by their names."""
    if isinstance(value, Mapping):
        return {key: in_json(part, replaced) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [in_json(part, replaced) for part in value]
    return replaced(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object; equal content gives equal bytes."""
    write_whole(path, (json_text(content, indent=2, sort=True) + "\n").encode())


def printable(text: str) -> str:
    """``text`` with control characters, and characters that cannot be encoded, escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" or unicodedata.category(each) == "Zs"
        else each.encode("unicode_escape").decode()
        for each in text
    )  # fmt: skip


def one_line(text: object, most: int = 500) -> str:
    """``text`` in one printable line of at most ``most`` characters."""
    said = printable(" ".join(str(text).split()))
    return said if len(said) <= most else said[: most - 1] + "…"


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]  # a disk that fills up first writes a part
