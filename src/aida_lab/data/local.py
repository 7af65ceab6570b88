"""What is there under the data root, and whether it is whole.

A folder that ``get`` or ``import`` wrote holds a receipt: where its files came from and their checksums,
so that damage is seen even in files of which nobody publishes a checksum.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from aida_lab.data.errors import DataError
from aida_lab.data.root import data_root
from aida_lab.data.sets import SETS, DataFile, DataSet
from aida_lab.runs.files import StoreError, read_object

RECEIPT = "receipt.json"

State = Literal["verified", "not verified", "missing", "damaged"]


@dataclass(frozen=True)
class Receipt:
    """Where the files of a folder came from."""

    source: str
    verified: bool  #: a published checksum covers every file
    md5: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """A line of ``aida data list``."""

    data: DataSet
    state: State
    where: str
    remark: str = ""


def require(data: DataSet, root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a set whose files are all there, in the right size; else a :class:`DataError`."""
    folder = _folder(data, root)
    if data.tree is not None:
        _check_tree(data, folder)
    for file in data.files:
        _check_size(data, file, folder)
    return folder


def read(data: DataSet, name: str, root: str | os.PathLike[str] | None = None) -> bytearray:
    """The content of one file, its checksum compared; writable, so that a tensor can be a view of it."""
    folder = _folder(data, root)
    file = next(each for each in data.files if each.name == name)
    _check_size(data, file, folder)
    content = bytearray(file.size)
    with (folder / name).open("rb") as stream:
        stream.readinto(content)
    wanted = _known_md5(file, receipt_of(folder))
    if wanted is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != wanted:
        raise _damaged(data, folder, name, f"its MD5 is not {wanted}")
    return content


def mend(data: DataSet, root: str | os.PathLike[str] | None = None) -> str:
    """The command that brings a set to that root, or brings it anew."""
    there = data_root(root)
    option = "" if there == data_root() else f" --data {there}"
    local = f"aida data import {data.name} PATH{option}"
    return f"aida data get {data.name}{option} (or, from a copy you have: {local})" if data.ways else local


def status(root: str | os.PathLike[str] | None = None) -> Iterator[Status]:
    """How each set stands, one at a time: the checksums of every file are computed."""
    for data in SETS:
        yield status_of(data, root)


def status_of(data: DataSet, root: str | os.PathLike[str] | None = None, verified: bool = False) -> Status:
    """How one set stands; ``verified`` where its official archive was checked just now.

    What a receipt says of that is no proof: anybody can write one.
    """
    if data.embedded:
        return Status(data, "verified", "scikit-learn", "in the package, needs no download")
    folder = data_root(root) / data.folder
    if not folder.is_dir():
        return Status(data, "missing", str(folder), mend(data, root))
    try:
        require(data, root)
        for file in data.files:
            read(data, file.name, root)
    except (DataError, OSError) as error:
        return Status(data, "damaged", str(folder), str(error))
    if data.tree is not None:
        return Status(data, "not verified", str(folder), "folders and classes are there; no checksum is published")
    if verified or all(file.md5 for file in data.files):
        return Status(data, "verified", str(folder))
    remark = "right sizes, but not checked against the published checksum of the archive"
    if (receipt := receipt_of(folder)) is not None and receipt.verified:
        remark = "as the official archive had it by its receipt; only the archive has a published checksum"
    return Status(data, "not verified", str(folder), remark)


def receipt_of(folder: Path) -> Receipt | None:
    """The receipt of a folder; None where there is none, or where it cannot be read."""
    try:
        fields = read_object(folder / RECEIPT) or {}
        return Receipt(str(fields["source"]), bool(fields["verified"]), dict(fields["md5"]))
    except (StoreError, ValueError, KeyError, TypeError):
        return None


def checksum(data: DataSet, root: str | os.PathLike[str] | None = None) -> str | None:
    """What tells the set that is there from any other: over its files, or over the names in its class folders.

    None if it is not there.
    """
    if data.embedded:
        return f"md5 {_digits_sum()}"
    folder = data_root(root) / data.folder
    if not folder.is_dir():
        return None
    if data.tree is not None:
        return f"names {_names_sum(folder, tuple(data.tree.images))}"
    found = [(file.name, (folder / file.name).stat()) for file in data.files if (folder / file.name).exists()]
    return f"md5 {_files_sum(folder, tuple((name, each.st_size, each.st_mtime_ns) for name, each in found))}"


@cache
def _digits_sum() -> str:
    packed = (files("sklearn.datasets.data") / "digits.csv.gz").read_bytes()
    return hashlib.md5(gzip.decompress(packed), usedforsecurity=False).hexdigest()


@cache
def _files_sum(folder: Path, there: tuple[tuple[str, int, int], ...]) -> str:
    """Sizes and times are asked for so that a file that changes is read again."""
    sums = "".join(f"{md5_of(folder / name)}  {name}\n" for name, _, _ in there)
    return hashlib.md5(sums.encode(), usedforsecurity=False).hexdigest()


@cache
def _names_sum(folder: Path, splits: tuple[str, ...]) -> str:
    found = hashlib.md5(usedforsecurity=False)
    for split in splits:
        for label in sorted(entry.name for entry in os.scandir(folder / split) if entry.is_dir()):
            names = sorted(entry.name for entry in os.scandir(folder / split / label) if is_image(entry.name))
            found.update(os.fsencode("\0".join([split, label, *names, ""])))
    return found.hexdigest()


def md5_of(path: Path) -> str:
    """MD5 of a file, read in pieces."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def images_below(split: Path) -> int:
    """How many images the class folders of a split hold."""
    return sum(
        is_image(image.name) for label in os.scandir(split) if label.is_dir() for image in os.scandir(label.path)
    )


def is_image(name: str) -> bool:
    """Whether a file in a class folder is an image, by its name."""
    return name.lower().endswith((".jpeg", ".jpg", ".png"))


def _folder(data: DataSet, root: str | os.PathLike[str] | None) -> Path:
    folder = data_root(root) / data.folder
    if not folder.is_dir():
        raise DataError(f"{data.title} is not at {folder}; bring it with: {mend(data, root)}")
    return folder


def _known_md5(file: DataFile, receipt: Receipt | None) -> str | None:
    return file.md5 or (receipt.md5.get(file.name) if receipt is not None else None)


def _check_size(data: DataSet, file: DataFile, folder: Path) -> None:
    path = folder / file.name
    if not path.is_file():
        raise DataError(f"{data.title}: {path} is missing; bring it with: {mend(data, folder.parent)}")
    size = path.stat().st_size
    if size != file.size:
        raise _damaged(data, folder, file.name, f"it has {size:,} bytes where {file.size:,} belong")


def _check_tree(data: DataSet, folder: Path) -> None:
    assert data.tree is not None
    for split in data.tree.images:
        if not (folder / split).is_dir():
            raise DataError(f"{data.title}: {folder / split} is missing; bring it with: {mend(data, folder.parent)}")
        classes = sum(entry.is_dir() for entry in os.scandir(folder / split))
        if classes != data.tree.classes:
            raise _damaged(data, folder, split, f"it has {classes} class folders where {data.tree.classes} belong")


def _damaged(data: DataSet, folder: Path, part: str, what: str) -> DataError:
    return DataError(f"{data.title}: {folder / part} is damaged, {what}; mend it with: {mend(data, folder.parent)}")
