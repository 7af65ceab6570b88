"""Download one file over HTTP: resume after a break, check size and MD5, move the file into place. Show progress."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aida_lab.data.local import DataError, md5_of
from aida_lab.data.sets import Download

#: Called with the file name, the bytes received so far, and the total (None if unknown).
Progress = Callable[[str, int, int | None], None]

#: HTTP status codes worth a retry: timeout, too many requests, server errors.
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_CHUNK = 1 << 18

#: Seconds between two lines about one file without a terminal.
_EVERY = 10.0


@dataclass(frozen=True)
class RetryPolicy:
    """When to retry a download and when to give up."""

    attempts: int = 5  #: attempts in a row without a new byte before the download fails
    timeout: float = 30.0  #: seconds without a byte that end an attempt
    pause: float = 1.0  #: seconds before the second attempt; doubled for each later one


class _InterruptedError(Exception):
    """An attempt ended early; the next one can resume."""


def download(source: Download, to: Path, *, progress: Progress | None = None, retry: RetryPolicy | None = None) -> None:
    """Download ``source`` to the path ``to``. Bytes of earlier attempts are kept in ``to`` + ``.part`` and resumed."""
    part = to.with_name(to.name + ".part")
    to.parent.mkdir(parents=True, exist_ok=True)
    resumed = _fill(source, part, progress, retry or RetryPolicy())
    fault = _fault(source, part)
    if fault and resumed:
        # the earlier bytes may belong to another version of the file, or may not all have reached the disk
        part.unlink()
        _fill(source, part, progress, retry or RetryPolicy())
        fault = _fault(source, part)
    if fault:
        part.unlink()
        raise DataError(f"{source.url} sent another file: {fault}; nothing was kept")
    part.replace(to)


def _fill(source: Download, part: Path, progress: Progress | None, retry: RetryPolicy) -> bool:
    """Complete the partial file. Returns True if the bytes come from more than one attempt."""
    resumed = False
    furthest = _size(part)
    failures = 0
    while True:
        resumed = resumed or _size(part) > 0
        try:
            _attempt(source, part, progress, retry.timeout)
            return resumed
        except _InterruptedError as error:
            here = _size(part)
            failures = 0 if here > furthest else failures + 1
            furthest = max(furthest, here)
            if failures >= retry.attempts:
                raise DataError(
                    f"{source.url}: {error}, {failures} times in a row; {here:,} bytes are kept in {part}; "
                    "run the same command again to resume"
                ) from None
            time.sleep(retry.pause * 2 ** max(failures - 1, 0))


def _attempt(source: Download, part: Path, progress: Progress | None, timeout: float) -> None:
    here = _size(part)
    if source.size is not None and here == source.size:
        return
    request = urllib.request.Request(source.url, headers={"User-Agent": "aida-optim"})
    if here:
        request.add_header("Range", f"bytes={here}-")
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # range not satisfiable: the partial file is complete, or belongs to another file
            if (error.headers.get("Content-Range") or "").endswith(f"/{here}"):
                return
            part.unlink()
            raise _InterruptedError("the partial file does not match the file on the server") from None
        message = f"the server answered {error.code} {error.reason}"
        if error.code in _TRANSIENT:
            raise _InterruptedError(message) from None
        raise DataError(f"{source.url}: {message}") from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise _InterruptedError(f"no connection ({_reason(error)})") from None
    with answer:
        if answer.status != 206:
            here = 0  # the server does not support Range and sends the whole file again
        elif not (answer.headers.get("Content-Range") or "").startswith(f"bytes {here}-"):
            raise DataError(f"{source.url}: the server sent another range than the requested one")
        length = answer.headers.get("Content-Length")
        total = here + int(length) if length and length.isdigit() else source.size
        with part.open("ab" if here else "wb") as stream:
            for chunk in _chunks(answer, here):
                # an error here, for example a full disk, is the caller's: a retry would not help
                here += stream.write(chunk)
                if progress:
                    progress(part.name.removesuffix(".part"), here, total)
                if source.size is not None and here > source.size:
                    return  # another file, larger than the known one; the caller reports it
        if total is not None and here < total:
            raise _InterruptedError(f"the connection broke after {here:,} of {total:,} bytes")


def _chunks(answer: http.client.HTTPResponse, here: int) -> Iterator[bytes]:
    """The bytes of an answer as they arrive; an empty chunk first, so that progress starts at once."""
    chunk = b""
    while True:
        yield chunk
        try:
            chunk = answer.read1(_CHUNK)
        except (http.client.HTTPException, OSError) as error:
            raise _InterruptedError(f"the connection broke after {here:,} bytes ({_reason(error)})") from None
        if not chunk:
            return
        here += len(chunk)


def _fault(source: Download, part: Path) -> str:
    size = _size(part)
    if source.size is not None and size != source.size:
        return f"{'more' if size > source.size else f'{size:,} bytes'} instead of {source.size:,} bytes"
    if source.md5 is not None and (found := md5_of(part)) != source.md5:
        return f"MD5 {found} instead of {source.md5}"
    return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error) or type(error).__name__


@contextmanager
def shown(console: Any) -> Iterator[Progress]:
    """A progress callback that draws on a rich console: a bar on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        printed: dict[str, float] = {}

        def say(name: str, here: int, total: int | None) -> None:
            now = time.monotonic()
            if name not in printed or here == total or now - printed[name] >= _EVERY:
                printed[name] = now
                of = f" of {total / 1e6:,.1f}" if total is not None else ""
                console.print(f"{name}: {here / 1e6:,.1f}{of} MB")

        yield say
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    description = TextColumn("{task.description}")
    columns = description, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def update(name: str, here: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=here, total=total)

        yield update
