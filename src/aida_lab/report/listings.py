"""Tables about the report itself: how the reference stands on each task, and which runs are excluded."""

from __future__ import annotations

from collections.abc import Sequence

from aida_lab.report import words
from aida_lab.report.columns import Column
from aida_lab.report.grids import Field, Grid, Head, absent, grid
from aida_lab.report.naming import title
from aida_lab.report.results import Results
from aida_lab.report.statistics import LEVEL
from aida_lab.report.tables import NO_RUNS, paper_field, seeds, why_empty
from aida_lab.report.verdict import STANDINGS, Rival, rivals

_STATES = {
    "diverged": "ended without a usable loss",
    "running": "a process is training it",
    "stopped": "not finished; the same command resumes it",
    "failed": "the last attempt failed; the same command retries it",
    "finished": "finished",
}


def glance(results: Results) -> Grid:
    """One row per task: the reference against the paper and against the others."""
    reference = title(results.reference)
    notes = {
        "better than": f"methods that {reference} beats significantly: Dunnett's test, p < {LEVEL}",
        "no significant difference": "methods that were tested, with a larger p-value",
        "worse than": f"methods that beat {reference} significantly",
        "ahead, not tested": f"better than {reference}, but not tested; * marks values that the paper did not try",
        "behind, not tested": f"worse than {reference}, but not tested",
    }
    heads = [Head("task", numeric=False), Head(reference), Head("paper")]
    heads += [Head(standing, notes[standing], False) for standing in STANDINGS]
    return grid("glance", f"{reference} on every task", heads, [_standing(column) for column in results.comparable])


def excluded(results: Results) -> Grid:
    """The runs and folders that are excluded from every mean, each with the reason."""
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
            why = "the same seed again, which counts once; the two differ only in the stepsize probe"
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
    """Folders that could not be used, one line per folder; the table of excluded runs lists all."""
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
    digits = column.digits
    own = column.cell(column.reference)
    row = [Field(column.title, note=f"{column.metric.title}, {column.metric.better} is better")]
    found = own.mean_std("best") if own else None
    if own is None or own.chosen is None or found is None:
        row.append(absent(why_empty(own) if own else NO_RUNS))
    else:
        text = f"{words.spread(found, digits)}, {seeds(own.chosen)}"
        row.append(Field(text, found.mean, "best" in own.leads, own.chosen.id))
    if own and own.paper:
        row.append(paper_field(own, digits))
    else:
        published = column.experiment is not None and column.reference in column.experiment.paper
        row.append(absent("of another variant" if published else "not in the paper"))
    others = rivals(column)
    methods = len({cell.method for cell in column.cells if cell.chosen} - {column.reference})
    return [*row, *(_named([each for each in others if each.standing == name], methods) for name in STANDINGS)]


def _named(found: Sequence[Rival], methods: int) -> Field:
    if not found:
        return Field("none", 0, faint=True)
    if len(found) == methods > 1:
        return Field(f"all {methods}", methods)
    return Field(f"{len(found)} of {methods}", len(found), note=", ".join(rival.name for rival in found))
