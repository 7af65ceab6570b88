"""The demo: a whole comparison in small, from runs to a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

#: What the demo compares; each under three seeds.
METHODS = ("aida-k1", "aida-k2", "adabelief", "adam", "adamw", "sgd")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report; made if missing.")] = Path("demo"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once.  [default: one a core, at most eight]")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the experiment's own number.")] = None,
) -> None:
    """Compare Aida with AdaBelief, Adam, AdamW and SGD on scikit-learn's digits: 18 short runs and a page.

    Needs no download and no GPU. The same command again shows what is there.
    """
    from aida_lab.cli.report import report
    from aida_lab.cli.train import train
    from aida_lab.workers.jobs import cores

    train(
        "digits",
        optimizer=list(METHODS),
        seeds="0-2",
        epochs=epochs,
        jobs=jobs or min(cores(), 8),
        out=out / "runs",
        device="cpu",
        probe=0,
    )
    report([out / "runs"], out=out / "report")
