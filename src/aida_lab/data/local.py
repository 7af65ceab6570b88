"""Find and check the data sets under the data root.

``get`` and ``import`` write a receipt into the folder: the source of the files and their checksums. It reveals damage
even in files without a published checksum.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from aida_lab import ExplainedError
from aida_lab.data.sets import DataSet
from aida_lab.runs.files import StoreError, read_object

RECEIPT = "receipt.json"

#: A data root as callers give it; :func:`data_root` says what None means.
Root = str | os.PathLike[str] | None


class DataError(ExplainedError, RuntimeError):
    """A data set is missing or damaged, or its download failed: one line with path and remedy."""


@dataclass(frozen=True)
class Receipt:
    """The source and the checksums of the files in a folder."""

    source: str
    verified: bool  #: whether a published checksum covers every file
    md5: Mapping[str, str]


@dataclass(frozen=True)
class Status:
    """One line of ``aida data list``."""

    data: DataSet
    state: Literal["verified", "not verified", "missing", "damaged"]
    where: str
    remark: str = ""


def data_root(given: Root = None) -> Path:
    """The given folder, else that of ``AIDA_DATA``, else the user's cache, as an absolute path. It may not exist."""
    named = os.environ.get("AIDA_DATA") or None if given is None else given
    if named is not None:
        return Path(named).expanduser().absolute()
    # the XDG specification ignores relative paths
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "aida"


def require(data: DataSet, root: Root = None) -> Path:
    """The folder of a data set. :class:`DataError` if a file is missing or has the wrong size."""
    for name in data.tree.images if data.tree is not None else [file.name for file in data.files]:
        _checked(data, name, root)
    return data_root(root) / data.folder


def read(data: DataSet, name: str, root: Root = None) -> bytearray:
    """The content of one file, after a check of its MD5. It is writable, so a tensor can be a view of it."""
    path = _checked(data, name, root)
    content = bytearray(path.stat().st_size)
    with path.open("rb") as stream:
        stream.readinto(content)
    receipt = receipt_of(path.parent)
    published = next(file.md5 for file in data.files if file.name == name)
    wanted = published or (receipt.md5.get(name) if receipt is not None else None)
    if wanted is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != wanted:
        raise _damaged(data, path, f"its MD5 is not {wanted}", root)
    return content


def _checked(data: DataSet, name: str, root: Root) -> Path:
    """The path of a file, or of a split of class folders. :class:`DataError` if it is missing or incomplete."""
    folder = data_root(root) / data.folder
    path, fix = folder / name, fix_command(data, root)
    if not folder.is_dir():
        raise DataError(f"{data.title} is not at {folder}; get it with: {fix}")
    if not (path.is_file() if data.tree is None else path.is_dir()):
        raise DataError(f"{data.title}: {path} is missing; get it with: {fix}")
    if data.tree is None:
        found, unit = path.stat().st_size, "bytes"
        wanted = next(file.size for file in data.files if file.name == name)
    else:
        found, unit, wanted = sum(entry.is_dir() for entry in os.scandir(path)), "class folders", data.tree.classes
    if found != wanted:
        raise _damaged(data, path, f"it has {found:,} {unit} instead of {wanted:,}", root)
    return path


def _damaged(data: DataSet, path: Path, what: str, root: Root) -> DataError:
    return DataError(f"{data.title}: {path} is damaged, {what}; fix it with: {fix_command(data, root)}")


def fix_command(data: DataSet, root: Root = None) -> str:
    """The command that downloads or imports a data set into that root."""
    there = data_root(root)
    option = "" if there == data_root() else f" --data {there}"
    local = f"aida data import {data.name} PATH{option}"
    return f"aida data get {data.name}{option} (or, from a copy you have: {local})" if data.can_be_downloaded else local


def status_of(data: DataSet, root: Root = None, verified: bool = False) -> Status:
    """The status of a data set. Computes the checksum of every file.

    ``verified`` means that the caller has just checked the official archive. A receipt does not prove that: anybody
    can write one.
    """
    if data.embedded:
        return Status(data, "verified", data.part_of, "needs no download")
    folder = data_root(root) / data.folder
    if not folder.is_dir():
        return Status(data, "missing", str(folder), fix_command(data, root))
    try:
        require(data, root)
        for file in data.files:
            read(data, file.name, root)
    except (DataError, OSError) as error:
        return Status(data, "damaged", str(folder), str(error))
    if data.tree is not None:
        return Status(data, "not verified", str(folder), "all class folders are there; no checksum is published")
    if verified or all(file.md5 for file in data.files):
        return Status(data, "verified", str(folder))
    remark = "sizes are right, but not checked against the published checksum of the archive"
    if (receipt := receipt_of(folder)) is not None and receipt.verified:
        remark = "from the official archive, by its receipt; only the archive has a published checksum"
    return Status(data, "not verified", str(folder), remark)


def receipt_of(folder: Path) -> Receipt | None:
    """The receipt of a folder; None if it is missing or cannot be read."""
    try:
        fields = read_object(folder / RECEIPT) or {}
        return Receipt(str(fields["source"]), bool(fields["verified"]), dict(fields["md5"]))
    except (StoreError, ValueError, KeyError, TypeError):
        return None


def checksum(data: DataSet, root: Root = None) -> str | None:
    """A checksum over the files, or over the names in the class folders. None if the data set is missing."""
    if data.embedded:
        return f"md5 {_embedded_sum(data.name)}"
    folder = data_root(root) / data.folder
    if not folder.is_dir():
        return None
    if data.tree is not None:
        return f"names {_names_sum(folder, tuple(data.tree.images))}"
    found = [(file.name, (folder / file.name).stat()) for file in data.files if (folder / file.name).exists()]
    return f"md5 {_files_sum(folder, tuple((name, each.st_size, each.st_mtime_ns) for name, each in found))}"


@cache
def _embedded_sum(name: str) -> str:
    if name == "stdlib":
        from aida_lab.data.pysource import library_sum

        return library_sum()
    packed = (files("sklearn.datasets.data") / "digits.csv.gz").read_bytes()
    return hashlib.md5(gzip.decompress(packed), usedforsecurity=False).hexdigest()


@cache
def _files_sum(folder: Path, there: tuple[tuple[str, int, int], ...]) -> str:
    """Cached by sizes and modification times, so that a changed file is read again."""
    sums = "".join(f"{md5_of(folder / name)}  {name}\n" for name, _, _ in there)
    return hashlib.md5(sums.encode(), usedforsecurity=False).hexdigest()


@cache
def _names_sum(folder: Path, splits: tuple[str, ...]) -> str:
    found = hashlib.md5(usedforsecurity=False)
    for split in splits:
        for label, names in class_folders(folder / split):
            found.update(os.fsencode("\0".join([split, label, *names, ""])))
    return found.hexdigest()


def md5_of(path: Path) -> str:
    """MD5 of a file, read in chunks."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def class_folders(split: Path) -> Iterator[tuple[str, list[str]]]:
    """The class folders of a split and the images in each, by name."""
    for label in sorted(entry.name for entry in os.scandir(split) if entry.is_dir()):
        names = (entry.name for entry in os.scandir(split / label))
        yield label, sorted(name for name in names if name.lower().endswith((".jpeg", ".jpg", ".png")))
