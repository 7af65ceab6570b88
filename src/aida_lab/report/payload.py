"""What the page's scripts read: runs, configurations and curves as plain values, thinned to a bounded size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aida_lab.report import words
from aida_lab.report.collect import Run
from aida_lab.report.columns import Column
from aida_lab.report.groups import Configuration
from aida_lab.report.landscape import landscapes
from aida_lab.report.naming import looks, title
from aida_lab.report.profile import profile
from aida_lab.report.results import Results
from aida_lab.report.tables import column_digits
from aida_lab.runs.files import in_json

#: Points of all curves together, of each of metric and loss; about seven bytes each on the page.
_BUDGET = 450_000
#: Points of one curve: more cannot be told apart on a screen, fewer would hide its shape.
_MOST, _FEWEST = 200, 20


def payload(results: Results, out: Path) -> dict[str, Any]:
    """Everything but the text; ``out`` is where the page will lie, and links to run folders start from there."""
    known = looks(results.methods)
    runs: list[dict[str, Any]] = []
    configurations: dict[str, Any] = {}
    points = max(_FEWEST, min(_MOST, _BUDGET // max(1, len(results.collection.runs))))
    columns = []
    for index, column in enumerate(results.columns):
        epochs = thinned(column.setup.epochs if column.setup else 1, points)
        for each in column.configurations:
            configurations[each.id] = {"column": index, **_configuration(each, len(runs))}
            runs += [_run(run, epochs, out, run.counts) for run in each.runs]
            runs += [_run(run, epochs, out, False) for run in each.repeats]  # a seed counts once
        columns.append(_column(column, epochs))
    found = profile(results.comparable)
    return {
        "methods": {
            method: {"title": title(method), "colour": look.colour, "dash": look.dash} for method, look in known.items()
        },
        "columns": columns,
        "configurations": configurations,
        "runs": runs,
        "profile": {"tasks": len(found.tasks), "gaps": found.gaps} if found else None,
    }


def thinned(epochs: int, points: int) -> list[int]:
    """At most so many epochs from the first to the last, evenly spaced; the same for every run of a column."""
    if epochs <= points:
        return list(range(1, epochs + 1))
    return [1 + round(step * (epochs - 1) / (points - 1)) for step in range(points)]


def _column(column: Column, epochs: Sequence[int]) -> dict[str, Any]:
    return {
        "id": column.id,
        "title": column.title,
        "metric": column.metric.title,
        "better": column.metric.better,
        "digits": column_digits(column),
        "epochs": epochs,
        "chosen": {cell.method: cell.chosen.id for cell in column.cells if cell.chosen},
        "searches": [
            {
                "setting": each.setting,
                "points": {m: [[value, found.id] for value, found in points] for m, points in each.points.items()},
                "ridges": {method: [found.id for _, found in each.ridge(method)] for method in each.points},
            }
            for each in landscapes(column)
        ],
    }


def _configuration(each: Configuration, first: int) -> dict[str, Any]:
    best, last, seconds = each.summary("best"), each.summary("last"), each.seconds()
    content = each.runs[0].spec.to_json()
    del content["seed"], content["probe_every"]
    return {
        "method": each.method,
        "spec": in_json(content),
        "n": len(each.counted),
        "best": [best.mean, best.std] if best else None,
        "last": [last.mean, last.std] if last else None,
        "seconds": [seconds.mean, seconds.std] if seconds else None,
        "runs": [first + index for index in range(len(each.runs) + len(each.repeats))],
        "hyper": words.settings(each.hyper),
    }


def _run(run: Run, epochs: Sequence[int], out: Path, counts: bool) -> dict[str, Any]:
    where = {epoch: index for index, epoch in enumerate(run.curve.epochs)}
    places = [where[epoch] for epoch in epochs if epoch in where]
    return {
        "key": run.key,
        "seed": run.spec.seed,
        "probe": run.spec.probe_every,
        "state": run.state,
        "counts": counts,
        "best": run.best,
        "bestEpoch": run.best_epoch,
        "last": run.last,
        "done": run.curve.epochs[-1] if run.curve.epochs else 0,
        "seconds": _rounded(run.seconds),
        "device": run.device,
        "commit": ", ".join(map(words.commit, run.commits)),
        "torch": ", ".join(run.torch),
        "remark": run.remark,
        "folder": _address(run.folder, out),
        "metric": _values(run.curve.metric, places),
        "loss": _values(run.curve.loss, places),
    }


def _values(curve: Sequence[float | None], places: Sequence[int]) -> list[float | None] | None:
    found = [_rounded(curve[place]) for place in places]
    return found if any(value is not None for value in found) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _address(folder: Path, out: Path) -> str:
    """The run's folder as seen from the page, for a link."""
    try:
        return quote(os.fsencode(Path(os.path.relpath(folder, out)).as_posix()))
    except ValueError:  # another drive
        return folder.resolve().as_uri()
