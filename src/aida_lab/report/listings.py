"""Tables about the report itself: where the reference stands on each task, and which runs are excluded."""

from __future__ import annotations

from collections.abc import Sequence

from aida_lab.report import words
from aida_lab.report.columns import Column
from aida_lab.report.grids import Field, Grid, Head, absent, grid
from aida_lab.report.naming import title
from aida_lab.report.statistics import LEVEL
from aida_lab.report.results import Results
from aida_lab.report.tables import NO_RUNS, column_digits, seeds, why_empty

_STATES = {
    "diverged": "ended without a usable loss",
    "running": "a process works on it",
    "stopped": "not finished; the same command goes on with it",
    "failed": "the last attempt broke; the same command tries again",
    "finished": "finished",
}


def glance(results: Results) -> Grid:
    """One row a task: how the reference does against the paper and against the others."""
    reference = title(results.reference)
    heads = [
        Head("task", numeric=False), Head(reference), Head("paper"),
        Head("better than", f"methods that {reference} beats significantly: Dunnett's test, p < {LEVEL}", False),
        Head("no significant difference", "methods that were tested, with a larger p-value", False),
        Head("worse than", f"methods that beat {reference} significantly", False),
        Head("untested", "methods of which no test can be made; the tables say why", False),
    ]  # fmt: skip
    rows = [_standing(column) for column in results.comparable]
    return grid("glance", f"{reference} on every task", heads, rows)


def excluded(results: Results) -> Grid:
    """Everything in the folders that enters no mean, and why."""
    heads = [
        Head("folder", numeric=False), Head("what", numeric=False), Head("experiment", numeric=False),
        Head("method", numeric=False), Head("seed"), Head("epochs"), Head("why it does not count", numeric=False),
    ]  # fmt: skip
    owners = {run.key: each.id for column in results.columns for each in column.configurations for run in each.runs}
    rows = [
        [Field(str(each.folder)), Field("not read"), *[absent("")] * 4, Field(each.problem)]
        for each in results.collection.unread
    ]
    repeats = {run.key for run in results.repeats}
    for run in results.collection.runs:
        if run.counts and run.key not in repeats:
            continue
        why = run.remark or _STATES.get(run.state, "")
        if run.key in repeats:
            why = "the same seed again, which counts once: only measuring stepsizes sets the two apart"
        done = run.curve.epochs[-1] if run.curve.epochs else 0
        rows.append(
            [
                Field(str(run.folder)), Field("repeat" if run.key in repeats else run.state),
                Field(run.spec.experiment), Field(title(run.spec.method)),
                Field(str(run.spec.seed), run.spec.seed, opens=owners.get(run.key, "")),
                Field(f"{done} of {run.spec.epochs}", done), Field(why),
            ]
        )  # fmt: skip
    return grid("excluded", "Excluded runs", heads, rows)


def skipped(results: Results) -> list[str]:
    """Folders that could not be used, a line each; the tables list all runs that are in no mean."""
    found = [f"{each.folder}: {each.problem}" for each in results.collection.unread]
    broken = ("damaged", "other metric", "two results")
    return found + [f"{run.folder}: {run.remark}" for run in results.collection.runs if run.state in broken]


def census(results: Results) -> str:
    """How many runs in which state, in words."""
    counted: dict[str, int] = {}
    for run in results.collection.runs:
        state = run.state if run.counts or run.state != "finished" else "without a number"
        counted[state] = counted.get(state, 0) + 1
    said = [f"{count:,} {state}" for state, count in sorted(counted.items(), key=lambda item: (-item[1], item[0]))]
    said += [words.plural(len(results.collection.unread), "folder") + " not read"] if results.collection.unread else []
    return ", ".join(said) or "no runs"


def _standing(column: Column) -> list[Field]:
    digits = column_digits(column)
    own = column.cell(column.reference)
    row = [Field(column.title, note=f"{column.metric.title}, {column.metric.better} is better")]
    found = own.summary("best") if own else None
    if own is None or own.chosen is None or found is None:
        row.append(absent(why_empty(own) if own else NO_RUNS))
    else:
        text = f"{words.spread(found, digits)}, {seeds(own.chosen)}"
        row.append(Field(text, found.mean, "best" in own.leads, own.chosen.id))
    if own and own.paper:
        std = f" ± {own.paper.std:.{digits}f}" if own.paper.std is not None else ""
        row.append(Field(words.number(own.paper.mean, digits) + std, own.paper.mean))
    else:
        published = column.experiment is not None and column.reference in column.experiment.paper
        row.append(absent("of another variant" if published else "not in the paper"))
    rivals = {cell.method: cell for cell in column.cells if cell.chosen and cell.method != column.reference}
    better, worse, unclear, untested = [], [], [], []
    for method, cell in rivals.items():
        comparison = cell.against_reference.get("best")
        if comparison is None or comparison.p is None:
            untested.append(method)
        elif not comparison.significant:
            unclear.append(method)
        elif (comparison.difference < 0) == (column.metric.better == "higher"):
            better.append(method)
        else:
            worse.append(method)
    return [*row, *(_named(methods, len(rivals)) for methods in (better, unclear, worse, untested))]


def _named(methods: Sequence[str], rivals: int) -> Field:
    if not methods:
        return Field("none", 0, faint=True)
    if len(methods) == rivals > 1:
        return Field(f"all {rivals}", rivals)
    return Field(f"{len(methods)} of {rivals}", len(methods), note=", ".join(map(title, methods)))
