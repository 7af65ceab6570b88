"""One run, tried: whatever happens to it becomes an event and an outcome, and another run can follow."""

from __future__ import annotations

import gc
import importlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aida_lab.events import Event, Listener
from aida_lab.progress.tensorboard_log import TensorboardLog
from aida_lab.runs.store import RunBusyError, RunFolder, RunLostError, StoreError
from aida_lab.spec import RunSpec
from aida_lab.training.options import Options
from aida_lab.training.run import Interrupted

State = Literal["finished", "diverged", "skipped", "interrupted", "failed", "busy"]

#: Trains one run: ``aida_lab.training.run.run``, or what stands for it in a test.
Runner = Callable[[RunSpec, Path, Options, Listener], Mapping[str, Any]]
RUNNER = "aida_lab.training.run:run"

#: Seconds between two "step" events that are passed on: a display shows no more, and a step may take less than one.
_PACE = 0.25


@dataclass(frozen=True)
class Outcome:
    """How an attempt at a run ended."""

    key: str
    state: State
    #: One line, where it is not done.
    error: str = ""

    @property
    def done(self) -> bool:
        """Whether the run has its result; one that diverged has."""
        return self.state in ("finished", "diverged", "skipped")


def runner_named(name: str) -> Runner:
    module, _, function = name.partition(":")
    found: Runner = getattr(importlib.import_module(module), function)
    return found


def attempt(spec: RunSpec, out: Path, options: Options, listen: Listener, runner: Runner) -> Outcome:
    """Train a run, or go on with it. Raises nothing but KeyboardInterrupt, which is a second Ctrl-C."""
    ear = _Ear(spec, listen, TensorboardLog(out / spec.key / "tensorboard") if options.tensorboard else None)
    try:
        with _warnings_as_notes(ear):
            result = runner(spec, out, options, ear)
        return Outcome(spec.key, "skipped" if ear.skipped else result["state"])
    except Interrupted as stopped:
        ear.say("interrupted")
        return Outcome(spec.key, "interrupted", str(stopped))
    except RunBusyError as error:
        ear.say("note", str(error))
        return Outcome(spec.key, "busy", str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a SystemExit out of a step is a failure of that step
        said = in_one_line(error)
        if not isinstance(error, RunLostError):  # then the folder is another's
            note_failure(spec, out, said, traceback.format_exc())
        ear.say("failed", said)
        return Outcome(spec.key, "failed", said)
    finally:
        ear.close()
        _tidy()


def note_failure(spec: RunSpec, out: Path, error: str, trace: str) -> None:
    """Keep in the run's folder why it broke, where that can be written."""
    with suppress(StoreError, RunBusyError), RunFolder.open(out, spec) as folder:
        if folder.result is None:
            folder.fail(error, trace)


def in_one_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def gpu_is_usable() -> bool:
    """Whether this process can do more on its GPU: after some errors CUDA refuses everything until it ends."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class _Ear:
    """Passes on what a run says, not too often, and remembers how far it is."""

    def __init__(self, spec: RunSpec, listen: Listener, log: TensorboardLog | None) -> None:
        self._listen, self._log = listen, log
        self._last = Event("note", spec.key, epochs=spec.epochs)
        self._spoken_at = 0.0
        self.skipped = False

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            now = time.monotonic()
            if now - self._spoken_at < _PACE:
                return
            self._spoken_at = now
        self._last = event
        self.skipped |= event.kind == "skipped"
        self._listen(event)
        if self._log is not None:
            self._log(event)

    def say(self, kind: Any, text: str = "") -> None:
        """Something about the run, at the point where it is."""
        last = self._last
        self._listen(Event(kind, last.run, last.epoch, last.epochs, last.share, text=text))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


@contextmanager
def _warnings_as_notes(ear: _Ear) -> Iterator[None]:
    """What the lab warns of, a damaged checkpoint say, belongs to the run; the rest goes where it always went."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning, module=r"aida_lab\.")
        elsewhere = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if Path(filename).is_relative_to(Path(__file__).parents[1]):
                ear.say("note", str(message))
            else:
                elsewhere(message, category, filename, lineno, *rest)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _tidy() -> None:
    """Leave the next run the process as this one found it."""
    # what torch compiled it keeps by the code, which runs share: the next run would get kernels that depend on the
    # shapes of this one, and after some recompilations none at all
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a GPU that refuses everything
            torch.cuda.empty_cache()
