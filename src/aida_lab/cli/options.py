"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataRoot = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets.", show_default="$AIDA_DATA, else aida in the user's cache"),
]
Precision = Annotated[str | None, typer.Option(help="fp32, tf32 or bf16.", show_default="bf16 on a GPU, fp32 on a CPU")]
Variant = Annotated[str | None, typer.Option(help="Variant of the experiment, if it has several.")]
JobCount = Annotated[int, typer.Option(min=1, help="Runs to train in parallel, each in its own process.")]
RunsFolder = Annotated[Path, typer.Option(help="Folder for the runs; created if missing.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="cuda if available")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use at most LIMIT batches per epoch, for a quick trial.")]
Warmup = Annotated[int, typer.Option(min=0, metavar="STEPS", help="Linear warm-up over STEPS steps.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Use deterministic kernels only.")]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile the model with torch.compile.",
        show_default="on a GPU, if the experiment gains from it",
    ),
]
Graph = Annotated[
    bool | None,
    typer.Option("--graph/--no-graph", help="Capture whole steps as CUDA graphs.", show_default="on a GPU"),
]
InceptionFile = Annotated[
    Path | None, typer.Option(help="File of Inception weights, which FID needs.", exists=True, dir_okay=False)
]
DecodingWorkers = Annotated[int, typer.Option(min=0, help="Processes per run that decode images (ImageNet only).")]
CheckpointSeconds = Annotated[float, typer.Option(min=0.0, help="Seconds between checkpoints.")]
