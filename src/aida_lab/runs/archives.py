"""Run records in one compressed file: ``pack`` and ``unpack`` turn them into the bytes of a ``.tar.xz`` and back.

An archive is never extracted to the disk here, so no name in it can reach a path. ``tar xf`` gives the run folders.
"""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from collections.abc import Mapping

#: How the name of an archive ends.
SUFFIX = ".tar.xz"
#: Limits in bytes: the compressed file, its content, and the memory of the decompressor.
PACKED_LIMIT, UNPACKED_LIMIT, _MEMORY = 256 << 20, 1 << 30, 128 << 20

_BLOCK = tarfile.BLOCKSIZE
_NAME = re.compile(r"[0-9a-f]{16}/(spec|env|result)\.json|[0-9a-f]{16}/(curve|stepsizes)\.jsonl")


def pack(files: Mapping[str, bytes]) -> bytes:
    """Compress ``files``, named ``<key>/<file>``. Equal files give equal bytes. ValueError if they are too large."""
    size = sum(_padded(content) + _BLOCK for content in files.values())
    if size > UNPACKED_LIMIT - tarfile.RECORDSIZE:
        raise ValueError(f"the records have {size:,} bytes; an archive holds at most {UNPACKED_LIMIT:,}")
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)  # its time, owner and mode are constants
            entry.size = len(files[name])
            tar.addfile(entry, io.BytesIO(files[name]))
    return lzma.compress(plain.getvalue())


def unpack(packed: bytes) -> dict[str, bytes]:
    """The files of an archive by name. ValueError if it is damaged, too large, or holds anything but run records."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, _MEMORY)
    try:
        plain = decompressor.decompress(packed, UNPACKED_LIMIT)
    except lzma.LZMAError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    if not decompressor.eof:
        raise ValueError(f"it is cut off, or holds more than {UNPACKED_LIMIT:,} bytes")
    files: dict[str, bytes] = {}
    place = 0
    # Header by header and not by tarfile.open, which some crafted archives keep in an endless loop.
    while plain[place : place + _BLOCK].strip(b"\0"):
        try:
            entry = tarfile.TarInfo.frombuf(plain[place : place + _BLOCK], "ascii", "strict")
        except tarfile.TarError as error:
            raise ValueError(f"it is no tar archive: {error}") from None
        place += _BLOCK
        if entry.isdir() and not entry.size:
            continue
        if entry.type != tarfile.REGTYPE or not _NAME.fullmatch(entry.name) or entry.name in files:
            raise ValueError(f"it holds {entry.name!a}, which is no file of a run, or is there twice")
        content = plain[place : place + max(entry.size, 0)]
        if len(content) != entry.size:
            raise ValueError(f"{entry.name} is cut off")
        files[entry.name] = content
        place += _padded(content)
    return files


def _padded(content: bytes) -> int:
    return -(-len(content) // _BLOCK) * _BLOCK
