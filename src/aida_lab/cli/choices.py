"""What the words of a command mean: an experiment, a device, a variant. A word without meaning ends the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aida_lab.cli.printing import fail

if TYPE_CHECKING:
    from aida_lab.spec import Experiment


def chosen_experiment(name: str | None, command: str) -> Experiment:
    from aida_lab.experiments import experiments, find_experiment

    if name is None:
        fail(f"which experiment? aida {command} EXPERIMENT; known are {', '.join(experiments())}")
    try:
        return find_experiment(name)
    except LookupError as error:
        fail(str(error.args[0]))


def chosen_device(given: str | None) -> str:
    from aida_lab.training.environment import choose_device

    if given is not None and given.partition(":")[0] not in ("cuda", "cpu"):
        fail(f"--device {given!r} is neither cuda nor cpu")
    try:
        device = choose_device(given)  # without opening it: runs in processes of their own share it without this one
    except ValueError as error:
        fail(str(error))
    return given or device.type


def chosen_variant(chosen: Experiment, asked: str | None, inception: Path | None) -> str | None:
    """A file of weights is given to be used: with it the variant that needs it is meant."""
    if inception is not None and "inception" not in chosen.variants:
        fail(f"--inception is of no use to {chosen.name}, which is not measured with it")
    if asked == "inception" and inception is None:
        fail("--variant inception measures FID and needs the file of its weights: --inception FILE")
    return "inception" if asked is None and inception is not None else asked


def require_data(names: Sequence[str], root: Path | None) -> None:
    """Refuse before anything is started."""
    from aida_lab.data.errors import DataError
    from aida_lab.data.local import require
    from aida_lab.data.sets import find

    for wanted in map(find, names):
        if not wanted.embedded:
            try:
                require(wanted, root)
            except DataError as error:
                fail(str(error))


@contextmanager
def words_checked() -> Iterator[None]:
    """Settings, seeds and names in here that have no meaning end the command in one line."""
    from aida_lab.parsing import UsageError

    try:
        yield
    except UsageError as error:
        fail(str(error))
    except LookupError as error:
        fail(str(error.args[0]))
