"""A run that is stopped in its second epoch and resumed, against the same run in one piece."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aida_lab.events import Event
from aida_lab.spec import RunSpec
from aida_lab.training.options import Options
from aida_lab.training.run import Interrupted, run

CPU = Options(device="cpu", threads=1)


def stop_in_the_second_epoch(event: Event) -> None:
    if event.kind == "step" and event.epoch == 1 and event.share > 0.3:
        os.kill(os.getpid(), signal.SIGINT)


def run_in_two_pieces(spec: RunSpec, folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The results of the run in one piece, and of the run that was stopped and resumed."""
    whole = run(spec, folder / "whole", CPU)
    with pytest.raises(Interrupted):
        run(spec, folder / "stopped", CPU, stop_in_the_second_epoch)
    return whole, run(spec, folder / "stopped", CPU)
