"""``aida demo``: a small but complete comparison, from training to the report's page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aida_lab.cli.choices import require_writable
from aida_lab.cli.options import Epochs
from aida_lab.cli.printing import load_torch, say
from aida_lab.cli.report import report
from aida_lab.cli.train import leave, work

#: The methods of the demo, each trained with three seeds.
METHODS = ("aida-k1", "aida-k2", "adabelief", "adam", "adamw", "sgd")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report; created if missing.")] = Path("demo"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs to train in parallel.", show_default="one per core, at most eight")
    ] = None,
    epochs: Epochs = None,
) -> None:
    """Compare Aida with AdaBelief, Adam, AdamW and SGD on scikit-learn's digits: 18 short runs and a page.

    Needs no download and no GPU. If you repeat the command, finished runs are not trained again.
    """
    require_writable(out)
    say(f"Training digits with {len(METHODS)} methods and 3 seeds each, then writing a report. All files go to {out}")
    load_torch()
    from aida_lab.experiments import find_experiment
    from aida_lab.request import RunRequest
    from aida_lab.training.options import Options
    from aida_lab.workers.jobs import cores

    request = RunRequest(find_experiment("digits"), METHODS, seeds=(0, 1, 2), epochs=epochs, probe_every=None)
    specs = request.specs()
    leave(specs, *work(specs, out / "runs", Options(device="cpu"), jobs or min(cores(), 8)))
    report([out / "runs"], out=out / "report")
