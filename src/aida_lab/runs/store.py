"""Write the folder of a run, so that a kill at any moment loses nothing before the last checkpoint.

``OUT/<key of the spec>/`` holds spec.json, env.json, curve.jsonl, stepsizes.jsonl, checkpoints/ and, written last,
result.json: a run with a result is complete. When a killed run is resumed, its logs are cut back to the last
checkpoint, so that they end up like those of a run that was never killed.
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
from typing import Any

from aida_lab.runs import files, records
from aida_lab.runs.checkpoints import load_checkpoint, save_checkpoint
from aida_lab.runs.files import StoreError, json_text, read_object, write_object, writing
from aida_lab.runs.lock import Lock
from aida_lab.runs.records import CHECKPOINTS, CURVE, DONE, ENV, FAILED, LOCK, RESULT, SPEC, STEPSIZES
from aida_lab.spec import RunSpec


class RunFolder:
    """The folder of a run, locked by the process that trains it; see :meth:`open`."""

    def __init__(self, path: Path, spec: RunSpec, lock: Lock, result: dict[str, Any] | None) -> None:
        self.path = path
        self.spec = spec
        self._lock: Lock | None = lock
        self.result = result  #: what :meth:`finish` wrote, in this process or an earlier one; None before
        #: Hash of the curve as this process knows it: what it found at the start, and every row it added.
        self._curve = hashlib.sha256()

    @classmethod
    def open(cls, out: str | os.PathLike[str], spec: RunSpec) -> RunFolder:
        """Create or open the run's folder under ``out`` and lock it; RunBusyError if another process holds the lock."""
        path = Path(out) / spec.key
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        files.check_no_links(path)  # before the lock, which writes to its file
        if (path / CHECKPOINTS).is_dir():
            files.check_no_links(path / CHECKPOINTS)
        lock = Lock(path / LOCK)
        try:
            files.remove_leftovers(path)
            files.remove_leftovers(path / CHECKPOINTS)
            try:
                written, result = read_object(path / SPEC), records.read_result(path)
            except StoreError as error:
                raise StoreError(f"{error}. Remove that file, and the same command resumes from the others") from None
            _keep_spec(path / SPEC, spec, written)
            if result is not None:
                try:
                    records.check_complete(path, spec, result, *records.read_rows(path))
                except StoreError as error:
                    raise StoreError(f"{error}. Remove {path}, and the same command trains the run again") from None
        except BaseException:
            lock.release()
            raise
        folder = cls(path, spec, lock, result)
        if result is not None:
            folder.drop_checkpoints()  # of a process that was killed after it wrote the result
        return folder

    def sessions(self) -> list[dict[str, Any]]:
        """The environments of the processes that trained the run before, in their order."""
        try:
            return records.read_sessions(self.path)
        except StoreError as error:
            warnings.warn(f"{self.path}: {error}; earlier sessions are lost", stacklevel=2)
            return []

    def begin_session(self, env: Mapping[str, Any]) -> None:
        """Record the environment of this process, and forget an earlier failure."""
        self._check_unfinished()
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        write_object(self.path / ENV, {"sessions": [*self.sessions(), {"started": started, **env}]})
        with writing(self.path / FAILED):
            (self.path / FAILED).unlink(missing_ok=True)

    def restart(self) -> None:
        """Move the result and the logs to the subfolder ``before``, so that the run is trained from its start."""
        aside = self.path / "before"
        with writing(aside):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            for name in (RESULT, CURVE, STEPSIZES):  # the result first: without it the run is incomplete
                if (self.path / name).exists():
                    os.replace(self.path / name, aside / name)
        self.drop_checkpoints()
        self.result = None

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Append an epoch to the curve. It is in the file at once, and flushed to the disk by :meth:`save`."""
        self._check_unfinished()
        line = json_text(row)
        files.append_line(self.path / CURVE, line)
        self._curve.update(f"{line}\n".encode())

    def rows(self) -> list[dict[str, Any]]:
        """The curve so far. Numbers that are not finite are None."""
        return records.read_curve(self.path)

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """Write a checkpoint: ``state``, the run's key, the lengths of the logs and the hash of the curve."""
        self._check_unfinished()
        logs = self._sync_logs()
        bound = {"run": self.spec.key, "curve": self._curve.hexdigest()}
        save_checkpoint(self.path / CHECKPOINTS, {"step": step, "logs": logs, **bound, "state": dict(state)}, step)

    def load(self) -> dict[str, Any] | None:
        """The state of the newest whole checkpoint, on the CPU; None if there is none. Cuts the logs back to it."""
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
        """Write the result and remove the checkpoints. StoreError if the curve is not what this process wrote."""
        self._check_unfinished()
        if result.get("state") not in DONE:
            raise ValueError(f"a result's state is {' or '.join(DONE)}, not {result.get('state')!r}")
        self._sync_logs()
        write_object(self.path / RESULT, result)
        self.result = records.read_result(self.path)
        self.drop_checkpoints()

    def drop_checkpoints(self) -> None:
        """Remove all checkpoints."""
        # what cannot be removed now is removed when the finished run is opened again
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

    def fail(self, error: str, trace: str = "") -> None:
        """Record why this attempt failed. Never raises: it is called while another error is handled."""
        lines = error.strip().splitlines() or ["no message"]
        try:
            write_object(self.path / FAILED, {"error": lines[0], "trace": trace})
        except StoreError as full:
            warnings.warn(f"the failure could not be recorded: {full}", stacklevel=2)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_unfinished(self) -> None:
        if self._lock is None:
            raise ValueError(f"{self.path} was closed; another process may be training it")
        self._lock.check()
        if self.result is not None:
            raise ValueError(f"{self.path} has a result and is not written again; remove the folder to repeat the run")

    def _sync_logs(self) -> dict[str, int]:
        """Flush the logs to the disk; returns their lengths. StoreError if the curve is not what was written."""
        if hashlib.sha256(self._curve_bytes()).digest() != self._curve.digest():
            raise StoreError(
                f"{self.path / CURVE} does not hold what this process wrote: another process wrote to it, or it was "
                "edited. The same command resumes from the last checkpoint"
            )
        lengths = {name: files.sync(self.path / name) for name in (CURVE, STEPSIZES)}
        with writing(self.path):
            files.sync_folder(self.path)
        return lengths

    def _curve_bytes(self) -> bytes:
        return files.read_regular(self.path / CURVE, files.CURVE_LIMIT) or b""

    def _objection(self, content: Mapping[str, Any]) -> str:
        # older checkpoints do not name their run
        if (run := content.get("run", self.spec.key)) != self.spec.key:
            return f"it belongs to run {run}, and this is {self.spec.key}"
        for name, length in content["logs"].items():
            log = self.path / name
            found = log.stat().st_size if log.exists() else 0
            if found < length:
                return f"{log} has {found:,} bytes, and had {length:,} when it was saved"
        curve = hashlib.sha256(self._curve_bytes()[: content["logs"].get(CURVE, 0)]).hexdigest()
        if content.get("curve", curve) != curve:
            return f"{self.path / CURVE} is not what it was when it was saved: a row was changed"
        return ""


def _keep_spec(path: Path, spec: RunSpec, written: Mapping[str, Any] | None) -> None:
    """Write the spec, or check that the file holds the same one."""
    ours = spec.to_json()
    # not json_text: a hyper-parameter may be infinite, which null would lose
    text = json.dumps(ours, indent=2, sort_keys=True)
    if written is None:
        files.write_whole(path, f"{text}\n".encode())
        with writing(path):
            files.sync_folder(path.parent.parent)
    elif json.dumps(written, indent=2, sort_keys=True) != text:
        other = ", ".join(sorted(key for key in {*ours, *written} if ours.get(key) != written.get(key)))
        raise StoreError(
            f"{path} is not the spec of this run, though its folder has the run's name; it differs in: {other}. It was "
            "edited, or two specs share a hash: move the folder away, or use another --out"
        )
