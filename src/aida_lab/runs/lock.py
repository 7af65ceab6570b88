"""A lock on a run's folder, released by the system when its holder dies.

Not filelock: a run must be recognised as busy without write access, the holder is named in the file, and versions of
filelock that torch still accepts truncate that file, follow links and keep the lock in forked children.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from aida_lab.runs.files import StoreError, one_line, open_regular, writing

#: Seconds to wait for a lock: :func:`is_held` holds one for microseconds.
_PATIENCE = 0.25

#: Descriptors of the locks that this process holds.
_mine: set[int] = set()


class RunBusyError(Exception):
    """Another process is training the run."""


class RunLostError(StoreError):
    """The folder was removed, or locked by another process, while this process trained the run."""


class Lock:
    """Held until :meth:`release` or the end of the process. Its file stays, and names the holder."""

    def __init__(self, path: Path) -> None:
        end = time.monotonic() + _PATIENCE
        while (descriptor := _try(path)) is None:
            if time.monotonic() > end:
                raise RunBusyError(f"{path.parent} is being trained by {_holder(path)}")
            time.sleep(0.01)
        self._path, self._descriptor = path, descriptor
        _mine.add(descriptor)
        since = datetime.now(timezone.utc).isoformat()
        self._text = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode()
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, self._text)
        except OSError:  # a full disk: the lock holds without the name
            self._text = b""

    def check(self) -> None:
        """RunLostError if this process has lost it: the folder was removed, or the file system's locks do not work."""
        if not self._is_ours():
            raise RunLostError(
                f"{self._path.parent} was removed, or taken by another process, while this one trained it; "
                "nothing more is written there. The same command resumes from the files that are there"
            )

    def _is_ours(self) -> bool:
        with suppress(OSError):
            same = os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
            return same and os.pread(self._descriptor, len(self._text), 0) == self._text
        return False

    def release(self) -> None:
        """Release it. Does nothing if it was released, or in a fork of the holder."""
        if self._descriptor in _mine:
            _mine.discard(self._descriptor)
            with suppress(OSError):
                if self._is_ours():
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock now. Writes nothing."""
    try:
        import fcntl

        with open(open_regular(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # no such file, or no locks here
        pass
    return False


def _try(path: Path) -> int | None:
    """The descriptor that holds the lock, or None if another process holds it."""
    try:
        import fcntl
    except ImportError:
        raise StoreError(
            "runs are locked by flock, which this system does not have; on Windows train under WSL"
        ) from None
    with writing(path):
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"{path} cannot be locked ({error.strerror}): this file system has no locks; use another --out"
        ) from error
    # held by another process, or the file was removed between open and flock and locks nothing
    os.close(descriptor)
    return None


def _holder(path: Path) -> str:
    try:
        with open(open_regular(path), errors="replace") as file:
            return one_line(file.read(1000)) or "another process"
    except OSError:
        return "another process"


def _close_inherited() -> None:
    """Forks, such as the workers of a DataLoader, must not keep the lock of a holder that was killed."""
    for descriptor in _mine:
        os.close(descriptor)
    _mine.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
