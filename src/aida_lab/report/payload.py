"""What the page's scripts read: runs, configurations and charts as plain values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aida_lab.report import charts, words
from aida_lab.report.collect import Run
from aida_lab.report.columns import Column
from aida_lab.report.groups import Configuration
from aida_lab.report.naming import DASHES, MARKERS, looks, title
from aida_lab.report.profile import profile
from aida_lab.report.results import Results
from aida_lab.runs.files import in_json, is_archive
from aida_lab.runs.records import SPEC


def payload(results: Results, out: Path) -> dict[str, Any]:
    """The data of the page at ``out``, the place from which links to run folders start."""
    runs: list[dict[str, Any]] = []
    configurations: dict[str, Any] = {}
    columns = []
    for index, column in enumerate(results.columns):
        epochs = charts.shown_epochs(column, len(results.collection.runs))
        for each in column.configurations:
            configurations[each.id] = {"column": index, **_configuration(each, column, len(runs))}
            runs += [_run(run, epochs, out) for run in (*each.runs, *each.repeats)]
        columns.append(_column(column, epochs))
    found = profile(results.comparable)
    return {
        "methods": {
            method: {"title": title(method), "colour": look.colour, "dash": look.dash}
            for method, look in looks(results.methods).items()
        },
        "dashes": DASHES,
        "markers": MARKERS,
        "columns": columns,
        "configurations": configurations,
        "runs": runs,
        "profile": charts.in_json(charts.profile_chart(found), _rounded) if found else None,
    }


def _column(column: Column, epochs: Sequence[int]) -> dict[str, Any]:
    return {
        "id": column.id,
        "title": column.title,
        "metric": column.metric.title,
        "better": column.metric.better,
        "digits": column.digits,
        "epochs": epochs,
        "views": [charts.in_json(each, _rounded) for each in charts.views(column, epochs)],
    }


def _configuration(each: Configuration, column: Column, first: int) -> dict[str, Any]:
    content = each.runs[0].spec.to_json()
    del content["seed"], content["probe_every"]
    seconds = each.seconds()
    facts = {
        f"{column.metric.title}, best epoch": words.spread(each.mean_std("best"), column.digits) or "none",
        "last epoch": words.spread(each.mean_std("last"), column.digits) or "none",
        "seeds": str(len(each.counted)),
        "seconds per epoch": words.spread(seconds, 2) or "not timed",
        "hyper-parameters": words.settings(each.hyper),
    }
    return {
        "method": each.method,
        "spec": in_json(content),
        "facts": facts,
        "runs": [first + index for index in range(len(each.runs) + len(each.repeats))],
    }


def _run(run: Run, epochs: Sequence[int], out: Path) -> dict[str, Any]:
    where = {epoch: index for index, epoch in enumerate(run.curve.epochs)}
    curve = [run.curve.metric[where[epoch]] for epoch in epochs if epoch in where]
    return {
        "key": run.key,
        "seed": run.spec.seed,
        "probe": run.spec.probe_every,
        "state": run.state,
        "best": run.best,
        "bestEpoch": run.best_epoch,
        "last": run.last,
        "done": run.curve.epochs[-1] if run.curve.epochs else 0,
        "seconds": None if run.seconds is None else _rounded(run.seconds),
        "device": run.device,
        "commit": ", ".join(map(words.commit, run.commits)),
        "torch": ", ".join(run.torch),
        "remark": run.remark,
        "link": _address(run.folder.parent if is_archive(run.folder.parent) else run.folder / SPEC, out),
        "metric": [None if value is None else _rounded(value) for value in curve]
        if any(value is not None for value in curve)
        else None,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _address(path: Path, out: Path) -> str:
    """A file as seen from the page, for a link."""
    try:
        return quote(os.fsencode(Path(os.path.relpath(path, out)).as_posix()))
    except ValueError:  # another drive
        return path.resolve().as_uri()
