"""Options that several commands share. A command takes a group of them as one value, declared as a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aida_lab.cli.choices import require_data
from aida_lab.cli.printing import fail

if TYPE_CHECKING:
    from aida_lab.request import RunRequest
    from aida_lab.spec import Experiment
    from aida_lab.training.options import Options

DataRoot = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets.", show_default="$AIDA_DATA, else aida in the user's cache"),
]

Name = Annotated[str | None, typer.Argument(metavar="EXPERIMENT", help="The experiment; aida experiments lists them.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a hyper-parameter, such as eps=1e-9 or betas=0.9,0.99."),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs.", show_default="as the experiment has it")]
Runs = Annotated[list[Path] | None, typer.Argument(metavar="RUNS", help="Folders of runs.", show_default="runs")]


@dataclass(frozen=True)
class StepOptions:
    """Options of every command that takes training steps."""

    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, tf32, bf16 (autocast) or bf16-true (also bf16 parameters).",
            show_default="bf16 on a GPU, fp32 on a CPU",
        ),
    ] = None
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="cuda if available")] = None
    data: DataRoot = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most LIMIT batches per epoch, for a quick trial.")
    ] = None
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the model with torch.compile.",
            show_default="on a GPU, if the experiment gains from it",
        ),
    ] = None
    graph: Annotated[
        bool | None,
        typer.Option("--graph/--no-graph", help="Capture whole steps as CUDA graphs.", show_default="on a GPU"),
    ] = None

    @cached_property
    def where(self) -> str:
        """The device; ends the command if there is no such device."""
        from aida_lab.training.environment import choose_device

        if self.device is not None and self.device.partition(":")[0] not in ("cuda", "cpu"):
            fail(f"--device {self.device!r} is neither cuda nor cpu")
        try:
            device = choose_device(self.device)  # does not initialize CUDA: workers use the GPU without this process
        except ValueError as error:
            fail(str(error))
        return self.device or device.type

    def request(self, chosen: Experiment, **rest: Any) -> RunRequest:
        from aida_lab.request import RunRequest

        return RunRequest(
            chosen, device=self.where, precision=self.precision, compiled=self.compiled, limit=self.limit, **rest
        )

    def training(self, **rest: Any) -> Options:
        from aida_lab.training.options import Options

        return Options(device=self.where, data_root=self.data, graph=self.graph, **rest)


@dataclass(frozen=True)
class RunOptions(StepOptions):
    """Options of ``aida train`` and ``aida search``."""

    variant: Annotated[str | None, typer.Option(help="Variant of the experiment, if it has several.")] = None
    jobs: Annotated[int, typer.Option(min=1, help="Runs to train in parallel, each in its own process.")] = 1
    out: Annotated[Path, typer.Option(help="Folder for the runs; created if missing.")] = Path("runs")
    warmup: Annotated[int, typer.Option(min=0, metavar="STEPS", help="Linear warm-up over STEPS steps.")] = 0
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Use deterministic kernels only.")] = False
    inception: Annotated[
        Path | None,
        typer.Option(
            help="File of Inception weights for FID; default: that of aida data get inception.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    workers: Annotated[int, typer.Option(min=0, help="Processes per run that decode images (ImageNet only).")] = 4
    checkpoint_seconds: Annotated[float, typer.Option(min=0.0, help="Seconds between checkpoints.")] = 30.0

    def request(self, chosen: Experiment, **rest: Any) -> RunRequest:
        variant = self.variant
        if self.inception is not None and "inception" not in chosen.variants:
            fail(f"{chosen.name} does not use --inception: no variant of it measures FID")
        if variant == "inception" and self.inception is None:
            require_data(["inception"], self.data)
        if variant is None and self.inception is not None:
            variant = "inception"  # the variant that needs the weights
        return super().request(chosen, variant=variant, deterministic=self.deterministic, warmup=self.warmup, **rest)

    def training(self, **rest: Any) -> Options:
        return super().training(
            inception=self.inception, workers=self.workers, checkpoint_seconds=self.checkpoint_seconds, **rest
        )


def takes(group: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command's last argument be a dataclass; typer sees its fields as options of the command."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        *own, last = signature.parameters.values()
        options = inspect.signature(group, eval_str=True).parameters

        @wraps(command)
        def flat(**given: Any) -> None:
            bundled = group(**{name: given.pop(name) for name in options})
            command(**given, **{last.name: bundled})

        shown = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *options.values())]
        flat.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return flat

    return decorated
