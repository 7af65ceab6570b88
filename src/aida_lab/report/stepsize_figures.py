"""The paper's figures of layerwise stepsizes, from the runs that recorded them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from aida.stepsizes.drawing import save
from aida.stepsizes.plots import draw, draw_paper_figures
from aida.stepsizes.sinks import StepsizeLog, read_jsonl
from aida_lab.report.collect import Run
from aida_lab.report.columns import Column
from aida_lab.report.results import Results
from aida_lab.runs.files import STEPSIZES_LIMIT, StoreError, file_exists, one_line, read_regular
from aida_lab.runs.records import STEPSIZES

#: Runs side by side in one figure; more are not readable.
_ABREAST = 6

#: Layers in one figure; each is a line.
_MOST = 5000


def draw_stepsizes(results: Results, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw the paper's figures whose methods were measured, and one of all methods; returns files and problems.

    Each method is shown by one run: the lowest seed of its best configuration with a probe. Aida with another number
    of projections is another method, as in the paper's figures.
    """
    written: list[Path] = []
    problems: list[str] = []
    for column in results.columns:
        logs = _logs(column, problems)
        if not logs:
            continue
        place = folder / f"stepsizes-{column.id}"
        written += draw_paper_figures(logs, place)
        written += save(draw(logs[:_ABREAST], ("mean", "std")), place / "all")
    return written, problems


def _logs(column: Column, problems: list[str]) -> list[StepsizeLog]:
    logs: list[StepsizeLog] = []
    for cell in column.cells:
        for run in _measured(run for each in cell.configurations for run in (*each.runs, *each.repeats)):
            log = _read(run, problems)
            if log is not None:
                logs.append(log)
                break
    return logs


def _measured(runs: Iterable[Run]) -> Iterable[Run]:
    return (run for run in runs if file_exists(run.folder / STEPSIZES))


def _read(run: Run, problems: list[str]) -> StepsizeLog | None:
    try:
        return read_stepsizes(run.folder / STEPSIZES)
    except (StoreError, ValueError) as error:
        problems.append(one_line(error))
        return None


def read_stepsizes(path: Path) -> StepsizeLog:
    """The records of a run; StoreError or ValueError if there are none."""
    content = read_regular(path, STEPSIZES_LIMIT)
    if content is None:
        raise StoreError(f"{path} is not there: a run records its stepsizes with aida train --probe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a torn last line: the run is then listed as unfinished
        log = read_jsonl(path, content)
    layers = len({record.layer for record in log.layers})
    if layers > _MOST:
        raise ValueError(f"{path} has {layers:,} layers; at most {_MOST:,} can be drawn")
    return log
