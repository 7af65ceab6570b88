"""The folder of a run, and how it is written so that it cannot be lost.

``OUT/<key of the spec>/`` holds spec.json, env.json, curve.jsonl, stepsizes.jsonl, checkpoints/ and, written
last, result.json: its existence is completion. What a killed run wrote after its last checkpoint is cut off
when it goes on, so that its files end as those of a run that was never killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from aida_lab.runs.checkpoints import load_checkpoint, save_checkpoint
from aida_lab.runs.files import (
    StoreError,
    append_line,
    check_no_links,
    json_text,
    read_object,
    remove_leftovers,
    sync,
    sync_folder,
    write_object,
    write_whole,
    writing,
)
from aida_lab.runs.lock import Lock, RunBusyError, RunLostError
from aida_lab.runs.records import (
    CHECKPOINTS,
    CURVE,
    DONE,
    ENV,
    FAILED,
    LOCK,
    RESULT,
    SPEC,
    STEPSIZES,
    RunRecord,
    State,
    check_complete,
    read_curve,
    read_result,
    read_run,
    read_sessions,
    scan,
)
from aida_lab.spec import RunSpec

#: With what reads runs (aida_lab.runs.records): all of the store is found here.
__all__ = [
    "DONE",
    "RunBusyError",
    "RunFolder",
    "RunLostError",
    "RunRecord",
    "State",
    "StoreError",
    "read_curve",
    "read_result",
    "read_run",
    "read_sessions",
    "scan",
    "writing",
]


class RunFolder:
    """The folder of one run, for the process that works on it; :meth:`open` makes it, and takes its lock."""

    def __init__(self, path: Path, spec: RunSpec, lock: Lock, result: dict[str, Any] | None) -> None:
        self.path = path
        self.spec = spec
        self._lock: Lock | None = lock
        self._result = result
        #: Over the curve as this process knows it: what was there when it began, and every row it added.
        self._curve = hashlib.sha256()

    @classmethod
    def open(cls, out: str | os.PathLike[str], spec: RunSpec) -> RunFolder:
        """The run's folder under ``out``, made where it is not there; :class:`RunBusyError` where another has it."""
        path = Path(out) / spec.key
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        check_no_links(path)  # first: taking the lock writes to its file
        if (path / CHECKPOINTS).is_dir():
            check_no_links(path / CHECKPOINTS)
        lock = Lock(path / LOCK)
        try:
            remove_leftovers(path)
            remove_leftovers(path / CHECKPOINTS)
            try:
                written, result = read_object(path / SPEC), read_result(path)
            except StoreError as error:
                raise StoreError(f"{error}. Remove that file, and the same command goes on from the rest") from None
            _keep_spec(path / SPEC, spec, written)
            if result is not None:
                try:
                    check_complete(path, spec, result)
                except StoreError as error:
                    raise StoreError(f"{error}. Remove {path}, and the same command trains the run again") from None
        except BaseException:
            lock.release()
            raise
        folder = cls(path, spec, lock, result)
        if result is not None:
            folder.drop_checkpoints()  # of a process killed between writing the result and doing this
        return folder

    @property
    def result(self) -> dict[str, Any] | None:
        """What :meth:`finish` wrote, in this process or an earlier one; None where the run has yet to end."""
        return self._result

    @property
    def stepsizes_path(self) -> Path:
        """For the probe's sink, opened after :meth:`load`, which may shorten the file."""
        return self.path / STEPSIZES

    def sessions(self) -> list[dict[str, Any]]:
        """The environments of the processes that worked on the run before, in their order."""
        try:
            return read_sessions(self.path)
        except StoreError as error:
            warnings.warn(f"{self.path}: {error}; what it said of earlier sessions is lost", stacklevel=2)
            return []

    def begin_session(self, env: Mapping[str, Any]) -> None:
        """Note that this process works on the run, and in which environment; an earlier failure is history."""
        self._check_unfinished()
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        write_object(self.path / ENV, {"sessions": [*self.sessions(), {"started": started, **env}]})
        with writing(self.path / FAILED):
            (self.path / FAILED).unlink(missing_ok=True)

    def begin_again(self) -> None:
        """Put aside what the run came to, in a folder ``before`` of its own, so that it is trained from its start."""
        aside = self.path / "before"
        with writing(aside):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            for name in (RESULT, CURVE, STEPSIZES):  # the result first: without it the run is not complete
                if (self.path / name).exists():
                    os.replace(self.path / name, aside / name)
        self.drop_checkpoints()
        self._result = None

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Add an epoch to the curve; it is in the file when this returns, and on the disk after :meth:`save`."""
        self._check_unfinished()
        line = json_text(row)
        append_line(self.path / CURVE, line)
        self._curve.update(f"{line}\n".encode())

    def rows(self) -> list[dict[str, Any]]:
        """The curve so far; a number that was not finite is None."""
        return read_curve(self.path)

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """Write a checkpoint: ``state``, whose it is, how far the logs reach, the curve's sum. Two are kept."""
        self._check_unfinished()
        logs = self._sync_logs()
        bound = {"run": self.spec.key, "curve": self._curve.hexdigest()}
        save_checkpoint(self.path / CHECKPOINTS, {"step": step, "logs": logs, **bound, "state": dict(state)}, step)

    def load(self) -> dict[str, Any] | None:
        """The state of the newest whole checkpoint, on the CPU; None where the run begins.

        Logs are cut back to where they were at that checkpoint.
        """
        self._check_unfinished()
        content = load_checkpoint(self.path / CHECKPOINTS, self._objection)
        lengths = {} if content is None else content["logs"]
        for name in (CURVE, STEPSIZES):
            log = self.path / name
            if log.exists():
                with writing(log):
                    os.truncate(log, lengths.get(name, 0))
        self._curve = hashlib.sha256(self._curve_bytes())
        return None if content is None else content["state"]

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result, after which the run is complete and its checkpoints go.

        StoreError if the curve does not hold what this process knows of it, row by row.
        """
        self._check_unfinished()
        if result.get("state") not in DONE:
            raise ValueError(f"a result's state is {' or '.join(DONE)}, not {result.get('state')!r}")
        self._sync_logs()
        write_object(self.path / RESULT, result)
        self._result = read_result(self.path)
        self.drop_checkpoints()

    def drop_checkpoints(self) -> None:
        """Remove them: the run has ended, or is not wanted any more."""
        # what cannot be removed now is removed when the finished run is opened again
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

    def fail(self, error: str, trace: str = "") -> None:
        """Note why this attempt broke. Never raises: it is called while another error is on its way."""
        lines = error.strip().splitlines() or ["no message"]
        try:
            write_object(self.path / FAILED, {"error": lines[0], "trace": trace})
        except StoreError as full:
            warnings.warn(f"the failure could not be noted: {full}", stacklevel=2)

    def close(self) -> None:
        """Let other processes have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_unfinished(self) -> None:
        if self._lock is None:
            raise ValueError(f"{self.path} was closed; another process may be working on it")
        self._lock.check()
        if self._result is not None:
            raise ValueError(
                f"{self.path} has its result and is not written again; remove the folder to repeat the run"
            )

    def _sync_logs(self) -> dict[str, int]:
        """Have the disk keep the logs; returns their lengths. StoreError if the curve is not what was written."""
        if hashlib.sha256(self._curve_bytes()).digest() != self._curve.digest():
            raise StoreError(
                f"{self.path / CURVE} does not hold what this process measured: another one wrote to it, or it was "
                "edited. The same command goes on from the last checkpoint"
            )
        lengths = {name: sync(self.path / name) for name in (CURVE, STEPSIZES)}
        with writing(self.path):
            sync_folder(self.path)
        return lengths

    def _curve_bytes(self, length: int = -1) -> bytes:
        try:
            with (self.path / CURVE).open("rb") as file:
                return file.read(length)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StoreError(f"{self.path / CURVE} cannot be read: {error.strerror or error}") from error

    def _objection(self, content: Mapping[str, Any]) -> str:
        # a checkpoint made before it was kept does not say whose it is
        if (run := content.get("run", self.spec.key)) != self.spec.key:
            return f"it is of run {run}, and this is {self.spec.key}"
        for name, length in content["logs"].items():
            log = self.path / name
            found = log.stat().st_size if log.exists() else 0
            if found < length:
                return f"{log} has {found:,} bytes, and had {length:,} when it was saved"
        curve = hashlib.sha256(self._curve_bytes(content["logs"].get(CURVE, 0))).hexdigest()
        if content.get("curve", curve) != curve:
            return f"{self.path / CURVE} is not what it was when it was saved: a row was changed"
        return ""


def _keep_spec(path: Path, spec: RunSpec, written: Mapping[str, Any] | None) -> None:
    """Write the file of the spec, or see that what is there is the same."""
    ours = spec.to_json()
    # not json_text: a hyper-parameter may be infinite, and null would not give it back
    text = json.dumps(ours, indent=2, sort_keys=True) + "\n"
    if written is None:
        write_whole(path, text.encode())
        with writing(path):
            sync_folder(path.parent.parent)
    elif json.dumps(written, indent=2, sort_keys=True) + "\n" != text:
        other = ", ".join(sorted(key for key in {*ours, *written} if ours.get(key) != written.get(key)))
        raise StoreError(
            f"{path} is not of this run, though its folder has the run's name; it differs in: {other}. It was edited, "
            "or two specs share a hash: move the folder away, or use another --out"
        )
