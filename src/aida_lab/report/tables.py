"""The tables of a report: methods against the paper, the paper's own layout, searches, runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from aida_lab.report import words
from aida_lab.report.columns import NOT_THE_PAPERS, Cell, Column, mixture, paper_variant
from aida_lab.report.grids import Field, Grid, Head, absent, grid
from aida_lab.report.groups import Configuration, Measure
from aida_lab.report.naming import ordered, title
from aida_lab.report.statistics import LEVEL, Comparison
from aida_lab.report.results import Table

NO_RUNS = "no runs"

_BOLD_MEAN = (
    f"Bold mean: the best of its column, and different from every other method without diverged seeds with p < {LEVEL}."
)
_BOLD_P = f"Bold p-value: below {LEVEL}."


def comparison(column: Column) -> Grid:
    """One column in full: each method ours beside the paper's, and against the reference."""
    reference = title(column.reference)
    measured = any(cell.chosen for cell in column.cells)
    with_paper = any(cell.paper for cell in column.cells)
    best_alone = any(cell.paper.best for cell in column.cells if cell.paper)
    heads = [
        Head("method", numeric=False),
        Head(
            "best epoch", f"mean ± std over seeds of {column.metric.title} at each run's best epoch, and which it was"
        ),
        Head("n", "seeds"),
        Head("last epoch", f"mean ± std over seeds of {column.metric.title} after the last epoch"),
        Head("best run", "the best of all seeds and configurations, which is what the paper's Table IV gives"),
        Head(
            "s / epoch",
            "training seconds per epoch: median of a run, mean over seeds; not of runs that shared a GPU; "
            "the paper's in brackets",
        ),
    ]
    if with_paper:
        heads += [
            Head("paper", "the best of all runs" if best_alone else "mean ± std of three repetitions"),
            Head("ours − paper", "our best run minus the paper's" if best_alone else "at the best epoch"),
            Head("p, paper", "Welch's test against the paper's mean and std, not adjusted"),
        ]
    heads += [
        Head(
            f"− {reference}",
            f"mean minus that of {reference}, at the best epoch, with its simultaneous 95 % confidence interval",
        ),
        Head(
            "p, best", f"Dunnett's test against {reference} at the best epoch, adjusted for all methods of this table"
        ),
        Head("p, last", f"Dunnett's test against {reference} after the last epoch, adjusted in the same way"),
        Head("tried", "sets of hyper-parameters that were tried; in small print those tried in shortened runs"),
    ]
    digits = column_digits(column)
    rows = [_comparison_row(cell, column, digits, with_paper) for cell in column.cells]
    return grid(column.id, column.title, heads, rows, *(_remarks(column) if measured else ["No finished run yet."]))


def overview(table: Table) -> Grid:
    """The paper's own layout: one row per method, one column per experiment, ours above and the paper's below."""
    columns = table.columns
    heads = [Head("method", numeric=False)]
    heads += [
        Head(column.title, f"{column.metric.title}; {column.metric.better} is better; {column.detail or 'no runs'}")
        for column in columns
    ]
    rows = []
    for method in ordered(cell.method for column in columns for cell in column.cells):
        row = [Field(title(method))]
        for column in columns:
            cell = column.cell(method)
            row.append(absent(NO_RUNS) if cell is None else _overview_field(cell, column))
        rows.append(row)
    leads = any("best" in cell.leads for column in columns for cell in column.cells)
    return grid(table.name, table.title, heads, rows, *([_BOLD_MEAN] if leads else []))


def search(column: Column) -> Grid:
    """Every configuration of a column, so that what a method's number was chosen from can be seen."""
    digits = column_digits(column)
    varied = varied_settings(column)
    heads = [
        Head("method", numeric=False), Head("hyper-parameters", "those that differ between its configurations", False),
        Head("best epoch"), Head("n"), Head("last epoch"), Head("diverged"), Head("not finished"),
        Head("", "stands for the method in the table above", numeric=False),
    ]  # fmt: skip
    rows = []
    for cell in column.cells:
        for each in cell.configurations:
            best, last = each.summary("best"), each.summary("last")
            shown = {name: each.hyper.get(name) for name in varied[cell.method]}
            rows.append(
                [
                    Field(title(cell.method)),
                    Field(words.settings(shown) or "the only one", opens=each.id),
                    Field(words.spread(best, digits), best.mean, opens=each.id) if best else absent("none finished"),
                    Field(str(len(each.counted)), len(each.counted)),
                    Field(words.spread(last, digits), last.mean, opens=each.id) if last else absent(""),
                    Field(str(each.diverged or ""), each.diverged),
                    Field(str(each.open or ""), each.open),
                    Field(_standing(each, cell)),
                ]
            )
    return grid(f"search-{column.id}", f"{column.title}: every configuration", heads, rows)


def _standing(each: Configuration, cell: Cell) -> str:
    said = ["chosen"] if each is cell.chosen else []
    said += [NOT_THE_PAPERS] if each.untried else []
    return "; ".join(said)


def varied_settings(column: Column) -> dict[str, list[str]]:
    """By method, the hyper-parameters in which its configurations differ."""
    found = {}
    for cell in column.cells:
        names = dict.fromkeys(name for each in cell.configurations for name in each.hyper)
        found[cell.method] = [
            name for name in names if len({repr(each.hyper.get(name)) for each in cell.configurations}) > 1
        ]
    return found


def column_digits(column: Column) -> int:
    means = [found.mean for cell in column.cells if (found := cell.summary("best"))]
    return words.decimals(means or [cell.paper.mean for cell in column.cells if cell.paper])


def _comparison_row(cell: Cell, column: Column, digits: int, with_paper: bool) -> list[Field]:
    row = [Field(title(cell.method)), *_opening(_ours(cell, column, digits), cell)]
    if with_paper:
        # not bold: these p-values are not adjusted for their number
        difference, p = _against(cell.against_paper, digits)
        row += [_paper(cell, digits), *_opening([difference, replace(p, bold=False)], cell)]
    if cell.method == column.reference and cell.chosen:
        row += [absent("reference"), absent(""), absent("")]
    else:
        best, last = (cell.against_reference.get(measure) for measure in ("best", "last"))
        row += _opening([*_against(best, digits), _p(last)], cell)
    note = f"{cell.elsewhere} shortened" if cell.elsewhere else ""
    return [*row, Field(str(cell.tried or ""), cell.tried or None, note=note)]


def _ours(cell: Cell, column: Column, digits: int) -> list[Field]:
    if cell.chosen is None:
        return [absent(why_empty(cell)), *[absent("")] * 4]
    return [
        replace(_mean(cell, "best", digits), note=_mean_epoch(cell.chosen)),
        Field(str(len(cell.chosen.counted)), len(cell.chosen.counted), note=_beside_n(cell.chosen)),
        _mean(cell, "last", digits),
        _best_run(cell, column, digits),
        _seconds(cell),
    ]


def _opening(fields: Sequence[Field], cell: Cell) -> list[Field]:
    """Every number of ours leads to its runs."""
    if cell.chosen is None:
        return list(fields)
    own = cell.chosen.id
    return [field if field.opens or field.order is None else replace(field, opens=own, quiet=True) for field in fields]


def _overview_field(cell: Cell, column: Column) -> Field:
    digits = column_digits(column)
    paper = f"paper {words.number(cell.paper.mean, digits)}" if cell.paper else ""
    if cell.paper and cell.paper.std is not None:
        paper += f" ± {cell.paper.std:.{digits}f}"
    best = cell.summary("best")
    if cell.chosen is None or best is None:
        return Field(why_empty(cell), note=paper, faint=True)
    text = f"{words.spread(best, digits)}, {seeds(cell.chosen)}"
    text += f", {NOT_THE_PAPERS}" if cell.chosen.untried else ""
    mixed = mixture(cell.chosen.counted)
    text += f", {mixed}" if mixed else ""
    return Field(text, best.mean, "best" in cell.leads, cell.chosen.id, note=paper)


def seeds(chosen: Configuration) -> str:
    """How many seeds a mean is of, and how many it leaves out because they diverged."""
    return f"n={len(chosen.counted)}" + (f", {chosen.diverged} diverged" if chosen.diverged else "")


def _mean(cell: Cell, measure: Measure, digits: int) -> Field:
    found = cell.summary(measure)
    assert found is not None
    assert cell.chosen is not None
    return Field(words.spread(found, digits), found.mean, measure in cell.leads, cell.chosen.id)


def _mean_epoch(chosen: Configuration) -> str:
    epochs = [run.best_epoch for run in chosen.counted if run.best_epoch is not None]
    return f"epoch {sum(epochs) / len(epochs):.0f}" if epochs else ""


def _best_run(cell: Cell, column: Column, digits: int) -> Field:
    value, configuration = cell.best_run(column.metric)
    return Field(words.number(value, digits), value, opens=configuration.id)


def _seconds(cell: Cell) -> Field:
    assert cell.chosen is not None
    ours = cell.chosen.seconds()
    paper = cell.paper.seconds if cell.paper else None
    note = f"paper {words.seconds(paper)}" if paper is not None else ""
    return Field(words.seconds(ours.mean), ours.mean, note=note) if ours else Field("not timed", note=note, faint=True)


def _paper(cell: Cell, digits: int) -> Field:
    if cell.paper is None:
        return absent("not in the paper")
    std = f" ± {cell.paper.std:.{digits}f}" if cell.paper.std is not None else ""
    return Field(words.number(cell.paper.mean, digits) + std, cell.paper.mean)


def _against(found: Comparison | None, digits: int) -> list[Field]:
    if found is None:
        return [absent(""), absent("")]
    note = ""
    if found.interval:
        low, high = (words.signed(end, digits) for end in found.interval)
        note = f"{low} to {high}"
    return [Field(words.signed(found.difference, digits), found.difference, note=note), _p(found)]


def _p(found: Comparison | None) -> Field:
    if found is None or found.p is None:
        return absent(words.p_value(found))
    return Field(words.p_value(found), found.p, bold=found.significant)


def why_empty(cell: Cell) -> str:
    """What to say of a method without a number."""
    said = [words.plural(cell.diverged, "run") + " diverged"] if cell.diverged else []
    said += [words.plural(cell.open, "run") + " not finished"] if cell.open else []
    return ", ".join(said) or NO_RUNS


def _beside_n(chosen: Configuration) -> str:
    """Runs that a mean leaves out, and whether those in it were made by different code."""
    said = [f"{chosen.diverged} diverged"] if chosen.diverged else []
    said += [f"{chosen.open} not finished"] if chosen.open else []
    said += [mixed] if (mixed := mixture(chosen.counted)) else []
    return ", ".join(said)


def _remarks(column: Column) -> Sequence[str]:
    """What a reader must know of this column beside the general explanations."""
    said = []
    experiment = column.experiment
    if experiment and experiment.paper and not column.departures and column.setup:
        variant = paper_variant(experiment)
        if not experiment.figures(column.setup.variant):
            said.append(f"The paper's figures compare with the variant {variant!r}, not with these.")
    reference = column.cell(column.reference)
    if reference is None or reference.chosen is None:
        said.append(
            f"No test: {title(column.reference)}, which the others are compared with, has no finished run here."
        )
    said += _tests(column)
    for cell in column.cells:
        if cell.chosen is None:
            continue
        said += _passed_over(cell, column)
    said.append(_origin(column))
    places = sorted({run.device for cell in column.cells if cell.chosen for run in cell.chosen.counted if run.device})
    if len(places) > 1:
        said.append(f"Times come from different devices, so do not compare them: {', '.join(places)}.")
    if experiment is not None and experiment.notes:
        said.append(experiment.notes)
    said += [_BOLD_MEAN] if any(cell.leads for cell in column.cells) else []
    significant = any(found.significant for cell in column.cells for found in cell.against_reference.values())
    return [*said, *([_BOLD_P] if significant else [])]


def _tests(column: Column) -> list[str]:
    """Which test the p-values against the reference are of."""
    tested = [found for cell in column.cells if (found := cell.against_reference.get("best")) and found.p is not None]
    if not tested:
        return []
    return [
        f"Tests against {title(column.reference)}: {tested[0].test}'s, unpaired, over the {len(tested) + 1} methods "
        f"with at least two runs; the pooled variance has {tested[0].freedom:.0f} degrees of freedom."
    ]


def _origin(column: Column) -> str:
    """The commits and torch versions behind the numbers, with their runs if there are several."""
    commits = Counter(commit for run in column.counted for commit in run.commits)
    versions = Counter(version for run in column.counted for version in run.torch)
    shown = [
        ", ".join(
            f"{name} ({words.plural(count, 'run')})" if len(found) > 1 else name
            for name, count in sorted(found.items(), key=lambda item: (-item[1], item[0]))
        )
        for found in (Counter({words.commit(name): count for name, count in commits.items()}), versions)
    ]
    mixed = f"Mixes {column.mixed}. " if column.mixed else ""
    return f"{mixed}Commit: {shown[0]}. torch: {shown[1]}."


def _passed_over(cell: Cell, column: Column) -> list[str]:
    """Where what stands for a method is not the paper's, or is not what has its best mean."""
    chosen, mean = cell.chosen, cell.summary("best")
    assert chosen is not None
    assert mean is not None
    name, digits = title(cell.method), column_digits(column)
    own = f"{name}: {words.settings(chosen.untried)} is not among the paper's values." if chosen.untried else ""
    stray = rare = ""
    for other in cell.configurations[1:]:  # ranked: the first of a kind is the one to name
        found = other.summary("best")
        if found is None or not column.metric.improves(found.mean, mean.mean):
            continue
        number = f"{words.number(found.mean, digits)} (n={found.n})"
        if other.untried and not chosen.untried:
            stray = stray or (
                f"{name}: {number} with {words.settings(other.untried)}, which is not among the paper's values "
                "and does not stand for it."
            )
        elif found.n < mean.n:
            rare = rare or (
                f"{name}: a configuration with fewer seeds has a better mean, {number}; repeat it to have it count."
            )
    return [said for said in (own, stray, rare) if said]
