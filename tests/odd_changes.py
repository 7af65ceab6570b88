"""What can be done to the folder of a good run: a file replaced, a value edited, the folder itself moved."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any


def put(name: str, content: bytes | str | Callable[[], bytes]) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        text = content() if callable(content) else content
        (run / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))

    return change


def without(run: Path, name: str) -> Path:
    (run / name).unlink(missing_ok=True)
    return run / name


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as each:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            each.bind(path.name)
        finally:
            os.chdir(here)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def edit(name: str, **changes: Any) -> Callable[[Path], object]:
    """Values of an object replaced; ``...`` takes one away."""

    def change(run: Path) -> None:
        content = json.loads((run / name).read_text())
        content = {key: value for key, value in {**content, **changes}.items() if value is not ...}
        (run / name).write_text(json.dumps(content))

    return change


def respec(**changes: Any) -> Callable[[Path], object]:
    """A spec with other values, in a folder that has the name it should have."""

    def change(run: Path) -> None:
        edit("spec.json", **changes)(run)
        content = json.loads((run / "spec.json").read_text())
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        run.rename(run.with_name(hashlib.sha256(text.encode()).hexdigest()[:16]))

    return change


def rehyper(**changes: Any) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        hyper = json.loads((run / "spec.json").read_text())["hyper"]
        respec(hyper={**hyper, **changes})(run)

    return change


def rerow(line: int, **changes: Any) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        rows = [json.loads(row) for row in (run / "curve.jsonl").read_text().splitlines()]
        rows[line] = {**rows[line], **changes}
        kept = [{key: value for key, value in row.items() if value is not ...} for row in rows]
        (run / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))

    return change


def revalue(*values: float) -> Callable[[Path], object]:
    """Another curve, and the result that it gives."""

    def change(run: Path) -> None:
        for line, value in enumerate(values):
            rerow(line, accuracy=value)(run)
        best = max(values)
        edit("result.json", best=best, best_epoch=values.index(best) + 1, last=values[-1])(run)

    return change


def session(**changes: Any) -> Callable[[Path], object]:
    return lambda run: (run / "env.json").write_text(json.dumps({"sessions": [changes]}))


def restep(**changes: Any) -> Callable[[Path], object]:
    """The same in every stepsize record."""

    def change(run: Path) -> None:
        rows = [json.loads(row) for row in (run / "stepsizes.jsonl").read_text().splitlines()]
        (run / "stepsizes.jsonl").write_text("".join(json.dumps({**row, **changes}) + "\n" for row in rows))

    return change


def moved(name: str) -> Callable[[Path], object]:
    return lambda run: run.rename(run.with_name(name))


def linked(run: Path) -> None:
    run.rename(run.parent.parent / "secret" / run.name)
    run.symlink_to(run.parent.parent / "secret" / run.name)


def emptied(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


def looped(run: Path) -> None:
    shutil.rmtree(run)
    run.symlink_to(run.name)
