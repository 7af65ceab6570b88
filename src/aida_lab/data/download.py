"""One file over HTTP: resumed where it broke off, checked, and in place only when it is whole."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from aida_lab.data.errors import DataError
from aida_lab.data.local import md5_of
from aida_lab.data.sets import Download

#: Called with the name of a file, the bytes that are there, and the bytes it will have (None: not known yet).
Progress = Callable[[str, int, int | None], None]

#: Refusals that may be gone at the next try: timeout, too many requests, and whatever is the server's own trouble.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_PIECE = 1 << 18


@dataclass(frozen=True)
class Patience:
    """How long to bear with a server."""

    attempts: int = 5  #: tries in a row that bring nothing new before it is given up
    timeout: float = 30.0  #: seconds without a byte that end a try
    pause: float = 1.0  #: seconds before the second try; doubled for each further one


class _BrokenOffError(Exception):
    """A try ended early; another may go on from there."""


def download(source: Download, to: Path, *, progress: Progress | None = None, patience: Patience | None = None) -> None:
    """Bring ``source`` to the path ``to``. Bytes of an earlier try, in ``to`` + ``.part``, are not asked for again."""
    patience = patience or Patience()
    part = to.with_name(to.name + ".part")
    to.parent.mkdir(parents=True, exist_ok=True)
    resumed = _fill(source, part, progress, patience)
    fault = _fault(source, part)
    if fault and resumed:
        # the earlier bytes may be of another version of the file, or of a write that never reached the disk
        part.unlink()
        _fill(source, part, progress, patience)
        fault = _fault(source, part)
    if fault:
        part.unlink()
        raise DataError(f"{source.address} sent something else: {fault}; nothing of it was kept")
    part.replace(to)


def _fill(source: Download, part: Path, progress: Progress | None, patience: Patience) -> bool:
    """Complete the partial file; True where it was put together from more than one try."""
    resumed = False
    furthest = _size(part)
    barren = 0
    while True:
        resumed = resumed or _size(part) > 0
        try:
            _one_try(source, part, progress, patience.timeout)
            return resumed
        except _BrokenOffError as broken:
            here = _size(part)
            barren = 0 if here > furthest else barren + 1
            furthest = max(furthest, here)
            if barren >= patience.attempts:
                raise DataError(
                    f"{source.address}: {broken}, {barren} times in a row; {here:,} bytes are kept in {part} "
                    "and the same command goes on from there"
                ) from None
            time.sleep(patience.pause * 2 ** max(barren - 1, 0))


def _one_try(source: Download, part: Path, progress: Progress | None, timeout: float) -> None:
    start = _size(part)
    if source.size is not None and start == source.size:
        return
    request = urllib.request.Request(source.address, headers={"User-Agent": "aida-optim"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # nothing lies behind the bytes that are there: whole, or not of this file
            if _total(error.headers.get("Content-Range")) == start:
                return
            part.unlink()
            raise _BrokenOffError("the earlier bytes do not fit the file") from None
        said = f"the server answered {error.code} {error.reason}"
        if error.code in _PASSING:
            raise _BrokenOffError(said) from None
        raise DataError(f"{source.address}: {said}") from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise _BrokenOffError(f"no connection ({_reason(error)})") from None
    with answer:
        if answer.status != 206:
            start = 0  # the server does not know Range and sends the whole file again
        elif not (answer.headers.get("Content-Range") or "").startswith(f"bytes {start}-"):
            raise DataError(f"{source.address}: the server sent another range than was asked for")
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length and length.isdigit() else source.size
        try:
            stream = part.open("ab" if start else "wb")
        except OSError as error:
            raise DataError(f"cannot write {part}: {error.strerror}") from None
        with stream:
            _copy(answer, stream, part, start, total, source.size, progress)


def _copy(
    answer: http.client.HTTPResponse,
    stream: IO[bytes],
    part: Path,
    start: int,
    total: int | None,
    most: int | None,
    progress: Progress | None,
) -> None:
    name, here = part.name.removesuffix(".part"), start
    if progress:
        progress(name, here, total)
    while True:
        try:
            piece = answer.read1(_PIECE)
        except (http.client.HTTPException, OSError) as error:
            raise _BrokenOffError(f"the connection broke after {here:,} bytes ({_reason(error)})") from None
        if not piece:
            break
        try:
            stream.write(piece)
        except OSError as error:  # a full disk: to ask the server again would not help
            raise DataError(f"cannot write {part}: {error.strerror}") from None
        here += len(piece)
        if progress:
            progress(name, here, total)
        if most is not None and here > most:
            return  # another file, as its size will tell; there may be no end to it
    if total is not None and here < total:
        raise _BrokenOffError(f"the connection broke after {here:,} of {total:,} bytes")


def _fault(source: Download, part: Path) -> str:
    size = _size(part)
    if source.size is not None and size != source.size:
        return f"{'more' if size > source.size else f'{size:,} bytes'} where {source.size:,} bytes belong"
    if source.md5 is not None and (found := md5_of(part)) != source.md5:
        return f"MD5 {found} where {source.md5} belongs"
    return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _total(content_range: str | None) -> int | None:
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdigit() else None


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error) or type(error).__name__
