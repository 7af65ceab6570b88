"""Try to train one run. Every error becomes an event and an outcome, so that the process can train the next run."""

from __future__ import annotations

import gc
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from aida_lab.events import Event, Listener, Pruned
from aida_lab.runs.files import StoreError
from aida_lab.runs.lock import RunBusyError, RunLostError
from aida_lab.runs.store import RunFolder
from aida_lab.spec import RunSpec
from aida_lab.training.options import Options
from aida_lab.training.run import Interrupted

OutcomeState = Literal["finished", "diverged", "skipped", "interrupted", "failed", "busy", "pruned"]

#: Trains one run: ``aida_lab.training.run.run``, or a substitute in tests.
Runner = Callable[[RunSpec, Path, Options, Listener], Mapping[str, Any]]

#: Minimum seconds between two forwarded "step" events. Steps can be much shorter, and a display needs no more.
_STEP_INTERVAL = 0.25


@dataclass(frozen=True)
class Outcome:
    """How an attempt at a run ended."""

    key: str
    state: OutcomeState
    error: str = ""  #: one line; empty if the run is done

    @property
    def done(self) -> bool:
        """Whether the run has a result. A diverged run has one."""
        return self.state in ("finished", "diverged", "skipped")


def attempt(spec: RunSpec, out: Path, options: Options, listen: Listener, runner: Runner) -> Outcome:
    """Train or resume a run. Raises only KeyboardInterrupt, on a second Ctrl-C."""
    forward = _Forwarder(spec, listen, out / spec.key / "tensorboard" if options.tensorboard else None)
    try:
        with _warnings_as_notes(forward):
            result = runner(spec, out, options, forward)
        return Outcome(spec.key, "skipped" if forward.skipped else result["state"])
    except Interrupted as stopped:
        forward.emit("interrupted")
        return Outcome(spec.key, "interrupted", str(stopped))
    except RunBusyError as error:
        forward.emit("note", str(error))
        return Outcome(spec.key, "busy", str(error))
    except Pruned:
        with suppress(StoreError, RunBusyError), RunFolder.open(out, spec) as folder:
            folder.drop_checkpoints()
        return Outcome(spec.key, "pruned")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: a step that exits has failed
        message = _in_one_line(error)
        if not isinstance(error, RunLostError):  # another process owns the folder after RunLostError
            record_failure(spec, out, message, traceback.format_exc())
        forward.emit("failed", message)
        return Outcome(spec.key, "failed", message)
    finally:
        forward.close()
        _clean_up()


def record_failure(spec: RunSpec, out: Path, error: str, trace: str) -> None:
    """Write the error to the run's folder if the folder is writable and free."""
    with suppress(StoreError, RunBusyError), RunFolder.open(out, spec) as folder:
        if folder.result is None:
            folder.fail(error, trace)


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def gpu_is_usable() -> bool:
    """Whether this process can still use its GPU. After some errors, CUDA fails until the process ends."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class _Forwarder:
    """Forwards the events of a run, limits the rate of "step" events, keeps the last event, and writes for TensorBoard.

    Every number of an epoch becomes a scalar, such as ``epoch/loss``, at its step, in the folder ``board`` if given.
    """

    def __init__(self, spec: RunSpec, listen: Listener, board: Path | None) -> None:
        self._listen, self._board = listen, board
        self._last = Event("note", spec.key, epochs=spec.epochs)
        self._last_step = 0.0
        self._writer: Any = None
        self.skipped = False

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            now = time.monotonic()
            if now - self._last_step < _STEP_INTERVAL:
                return
            self._last_step = now
        self._last = event
        self.skipped |= event.kind == "skipped"
        if self._board is not None and event.kind == "epoch":
            self._write(self._board, event.row)
        self._listen(event)

    def _write(self, board: Path, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # a killed run repeats the epochs after its last checkpoint: TensorBoard discards the first ones
            self._writer = SummaryWriter(str(board), purge_step=row["step"])  # type: ignore[no-untyped-call]
        for name, value in row.items():
            if name not in ("epoch", "step") and value is not None:
                self._writer.add_scalar(f"epoch/{name}", value, row["step"])
        self._writer.flush()

    def emit(self, kind: Any, text: str = "") -> None:
        """Send an event with the run's current epoch."""
        last = self._last
        self._listen(Event(kind, last.run, last.epoch, last.epochs, last.share, text=text))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@contextmanager
def _warnings_as_notes(forward: _Forwarder) -> Iterator[None]:
    """Turn warnings of the lab, such as a damaged checkpoint, into notes of the run. Others are shown as usual."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning, module=r"aida_lab\.")
        show_others = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if Path(filename).is_relative_to(Path(__file__).parents[1]):
                forward.emit("note", str(message))
            else:
                show_others(message, category, filename, lineno, *rest)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _clean_up() -> None:
    """Free what the run cached, so that it cannot affect the next run."""
    # torch.compile caches by code object, which runs share: the next run would reuse kernels specialized on the
    # shapes of this run, and reach the recompile limit after some runs
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # the GPU is not usable
            torch.cuda.empty_cache()
