"""One process works on a run: a lock that the system itself lets go of when its holder dies."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from aida_lab.runs.files import StoreError, one_line, open_regular, writing

#: Seconds to bear with a lock that is held: a reader that only asks holds one for microseconds.
_PATIENCE = 0.25

#: Descriptors of the locks that this process holds.
_mine: set[int] = set()


class RunBusyError(Exception):
    """Another process works on the run."""


class RunLostError(StoreError):
    """The folder was removed, or another process took it, while this one worked on the run."""


class Lock:
    """Held from its making to :meth:`release`, or to the death of the process. Its file stays, and names the holder."""

    def __init__(self, path: Path) -> None:
        end = time.monotonic() + _PATIENCE
        while (descriptor := _try(path)) is None:
            if time.monotonic() > end:
                raise RunBusyError(f"{path.parent} is being worked on by {_holder(path)}")
            time.sleep(0.01)
        self._path, self._descriptor = path, descriptor
        _let_go_in_forks()
        _mine.add(descriptor)
        since = datetime.now(timezone.utc).isoformat()
        self._text = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode()
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, self._text)
        except OSError:  # the lock holds without it, on a full disk say
            self._text = b""

    def check(self) -> None:
        """RunLostError if it is not ours any more: its folder was removed, or the file system's locks hold nobody."""
        if not self._is_ours():
            raise RunLostError(
                f"{self._path.parent} was removed, or taken by another process, while this one worked on it; "
                "nothing more is written there. The same command goes on from what is there"
            )

    def _is_ours(self) -> bool:
        with suppress(OSError):
            same = os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
            return same and os.pread(self._descriptor, len(self._text), 0) == self._text
        return False

    def release(self) -> None:
        """Let it go; a second time, or in a fork of the holder, does nothing."""
        if self._descriptor in _mine:
            _mine.discard(self._descriptor)
            with suppress(OSError):
                if self._is_ours():
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock at this moment; takes no part in it, and writes nothing."""
    try:
        import fcntl

        descriptor = open_regular(path)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: nobody can hold one
        return False
    finally:
        os.close(descriptor)
    return False


def _try(path: Path) -> int | None:
    """The descriptor that holds the lock, or None where another one does."""
    try:
        import fcntl
    except ImportError:
        raise StoreError(
            "runs are kept apart by flock, which this system does not have; on Windows train under WSL"
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
    # held by another, or of a file that was removed between open and flock, which would keep nobody out
    os.close(descriptor)
    return None


def _holder(path: Path) -> str:
    try:
        with open(open_regular(path), errors="replace") as file:
            return one_line(file.read(1000)) or "another process"
    except OSError:
        return "another process"


@cache
def _let_go_in_forks() -> None:
    """Forks, such as a loader's workers, must not keep the lock of a holder that was killed."""
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    for descriptor in _mine:
        os.close(descriptor)
    _mine.clear()
