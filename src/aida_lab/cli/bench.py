"""``aida bench``: seconds per epoch of each optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aida_lab.cli.options import StepOptions, takes
from aida_lab.cli.printing import console, fail, say_written

#: The methods of the paper's table of seconds per epoch, and the fastest AdamW.
_METHODS = ("sgd", "adamw", "adabelief", "aida-k1", "aida-k2")


@takes(StepOptions)
def bench_train(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(metavar="EXPERIMENT", help="Experiments to time.", show_default="vgg11-cifar10"),
    ] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="As in aida train.", show_default=", ".join(_METHODS))
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to time, after two for warm-up.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="Runs of one method in parallel, each in its own process.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file for all times; a Markdown table goes next to it.")] = None,
    *,
    options: StepOptions,
) -> None:
    """Time the epochs of an experiment with several optimizers.

    With one job, all methods take turns in this process, and the optimizer's share of the training time is
    measured too. With more, each method trains that many seeds in parallel, and the time is given per epoch and run.
    """
    import json

    from rich.text import Text

    from aida_lab import bench
    from aida_lab.experiments import find_experiment
    from aida_lab.training.environment import choose_device, describe

    timings: list[bench.Timing] = []
    where = choose_device(options.where)
    if out is not None and not out.absolute().parent.is_dir():
        fail(f"--out {out}: there is no folder {out.absolute().parent}")  # before the measurement, not after it
    try:
        training = options.training(checkpoint_seconds=1e9)
        machine = describe(where, "")
        with console().status("building") as status:

            def show(text: str) -> None:
                status.update(Text(text))  # as text: the name of a class is not markup

            for name in experiments or ["vgg11-cifar10"]:
                # enough epochs that no timed epoch is the last, which some experiments measure differently
                request = options.request(find_experiment(name), optimizers=tuple(optimizer or _METHODS), epochs=10_000)
                if jobs == 1:
                    found, machine = bench.side_by_side(request.specs(), epochs, training, show)
                    timings += found
                else:
                    timings += [bench.at_once(spec, jobs, epochs, training, show) for spec in request.specs()]
    except (ValueError, bench.NotTimed) as error:
        fail(str(error))
    text = bench.as_markdown(timings)
    print(text)
    if out is not None:
        beside = out.with_suffix(".md")
        try:
            out.write_text(json.dumps(bench.as_json(timings, machine), indent=1) + "\n", encoding="utf-8")
            beside.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            fail(f"cannot write the times: {error}")
        say_written([out, beside])
