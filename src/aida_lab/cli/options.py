"""Options that several commands take, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataRoot = Annotated[
    Path | None, typer.Option("--data", help="The data root; else AIDA_DATA, else aida in the user's cache.")
]
Precision = Annotated[str | None, typer.Option(help="fp32, tf32 or bf16.", show_default="bf16 on a GPU, fp32 on a CPU")]
Variant = Annotated[str | None, typer.Option(help="A form of the protocol, where there are several.")]
JobCount = Annotated[int, typer.Option(min=1, help="Runs at once, each in a process of its own.")]
RunsFolder = Annotated[Path, typer.Option(help="The folder of runs; made if missing.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="cuda where there is one")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many batches an epoch, for a trial.")]
Warmup = Annotated[
    int, typer.Option(min=0, metavar="STEPS", help="Reach the learning rate in a straight line over so many steps.")
]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Only kernels that give the same bits again.")]
Compiled = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Compile the model.", show_default="where it pays, on a GPU"),
]
Graph = Annotated[
    bool | None, typer.Option("--graph/--no-graph", help="Whole steps as CUDA graphs.", show_default="on a GPU")
]
InceptionFile = Annotated[
    Path | None, typer.Option(help="A file of Inception weights, to measure FID.", exists=True, dir_okay=False)
]
DecodingWorkers = Annotated[int, typer.Option(min=0, help="Processes that decode images, for each run on ImageNet.")]
CheckpointSeconds = Annotated[float, typer.Option(min=0.0, help="Seconds between two checkpoints.")]
