"""The tables of a report: methods against the paper, the paper's own layout, searches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from aida_lab.report import words
from aida_lab.report.columns import NOT_THE_PAPERS, Cell, Column, mixture, paper_variant
from aida_lab.report.grids import Field, Grid, Head, absent, grid, without_empty
from aida_lab.report.groups import Configuration, Measure
from aida_lab.report.naming import ordered, title
from aida_lab.report.results import Table
from aida_lab.report.statistics import LEVEL, Comparison

NO_RUNS = "no runs"

_BOLD_MEAN = (
    f"Bold mean: the best of its column, and significantly different (p < {LEVEL}) from every other method without "
    "diverged seeds."
)
_BOLD_P = f"Bold p-value: below {LEVEL}."


def comparison(column: Column) -> Grid:
    """One column in full: each method with runs beside the paper's figure, and against the reference."""
    reference = title(column.reference)
    measured = any(cell.chosen for cell in column.cells)
    cells = [cell for cell in column.cells if cell.configurations]
    with_paper = any(cell.paper for cell in cells)
    best_alone = any(cell.paper.best for cell in cells if cell.paper)
    heads = [
        Head("method", numeric=False),
        Head(
            "best epoch", f"mean ± std over seeds of {column.metric.title} at each run's best epoch, and which it was"
        ),
        Head("n", "number of seeds"),
        Head("last epoch", f"mean ± std over seeds of {column.metric.title} after the last epoch"),
        Head(
            "s / epoch",
            "training seconds per epoch: median of a run, mean over seeds; runs that shared a device are not timed",
        ),
    ]
    if best_alone:
        heads.append(Head("best run", "the best of all seeds and configurations, as in the paper's Table IV"))
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
    rows = [_comparison_row(cell, column, best_alone, with_paper) for cell in cells]
    remarks = _remarks(column) if measured else ["No finished run yet."]
    return without_empty(grid(column.id, column.title, heads, rows, *remarks))


def overview(table: Table) -> Grid:
    """The paper's own layout: one row per method, one column per experiment, our mean above the paper's."""
    columns = table.columns
    heads = [Head("method", numeric=False)]
    heads += [
        Head(column.title, f"{column.metric.title}; {column.metric.better} is better; {column.setup.manner}")
        for column in columns
    ]
    rows = []
    for method in ordered(cell.method for column in columns for cell in column.cells if cell.configurations):
        row = [Field(title(method))]
        for column in columns:
            cell = column.cell(method)
            row.append(_overview_field(cell, column) if cell else absent(NO_RUNS))
        rows.append(row)
    leads = any("best" in cell.leads for column in columns for cell in column.cells)
    return grid(table.name, table.title, heads, rows, *([_BOLD_MEAN] if leads else []))


def search(column: Column) -> Grid:
    """Every configuration of a column: what each method's number was chosen from."""
    digits = column.digits
    varied = varied_settings(column)
    heads = [
        Head("method", numeric=False), Head("hyper-parameters", "those that differ between its configurations", False),
        Head("best epoch"), Head("n"), Head("last epoch"), Head("diverged"), Head("not finished"),
        Head("remark", "chosen: shown in the table above", numeric=False),
    ]  # fmt: skip
    rows = []
    for cell in column.cells:
        for each in cell.configurations:
            best, last = each.mean_std("best"), each.mean_std("last")
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
    return without_empty(grid(f"search-{column.id}", f"{column.title}: every configuration", heads, rows))


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


def _comparison_row(cell: Cell, column: Column, best_alone: bool, with_paper: bool) -> list[Field]:
    digits = column.digits
    row = [Field(title(cell.method)), *_opening(_ours(cell, digits), cell)]
    if best_alone:
        row.append(_best_run(cell, column, digits) if cell.chosen else absent(""))
    if with_paper:
        # not bold: these p-values are not adjusted for their number
        difference, p = _against(cell.against_paper, digits)
        row += [paper_field(cell, digits), *_opening([difference, replace(p, bold=False)], cell)]
    if cell.method == column.reference and cell.chosen:
        row += [absent("reference"), absent(""), absent("")]
    else:
        best, last = (cell.against_reference.get(measure) for measure in ("best", "last"))
        row += _opening([*_against(best, digits), _p(last)], cell)
    note = f"{cell.elsewhere} shortened" if cell.elsewhere else ""
    return [*row, Field(str(cell.tried or ""), cell.tried or None, note=note)]


def _ours(cell: Cell, digits: int) -> list[Field]:
    if cell.chosen is None:
        return [absent(why_empty(cell)), *[absent("")] * 3]
    return [
        replace(_mean(cell, "best", digits), note=_mean_epoch(cell.chosen)),
        Field(str(len(cell.chosen.counted)), len(cell.chosen.counted), note=_beside_n(cell.chosen)),
        _mean(cell, "last", digits),
        _seconds(cell),
    ]


def _opening(fields: Sequence[Field], cell: Cell) -> list[Field]:
    """The fields, each with a link to its runs."""
    if cell.chosen is None:
        return list(fields)
    own = cell.chosen.id
    return [field if field.opens or field.order is None else replace(field, opens=own, quiet=True) for field in fields]


def _overview_field(cell: Cell, column: Column) -> Field:
    digits = column.digits
    paper = f"paper {paper_field(cell, digits).text}" if cell.paper else ""
    best = cell.mean_std("best")
    if cell.chosen is None or best is None:
        return Field(why_empty(cell), note=paper, faint=True)
    text = f"{words.spread(best, digits)}, {seeds(cell.chosen)}"
    text += f", {NOT_THE_PAPERS}" if cell.chosen.untried else ""
    mixed = mixture(cell.chosen.counted)
    text += f", {mixed}" if mixed else ""
    return Field(text, best.mean, "best" in cell.leads, cell.chosen.id, note=paper)


def seeds(chosen: Configuration) -> str:
    """The number of seeds in a mean, and of diverged seeds that are not in it."""
    return f"n={len(chosen.counted)}" + (f", {chosen.diverged} diverged" if chosen.diverged else "")


def _mean(cell: Cell, measure: Measure, digits: int) -> Field:
    found = cell.mean_std(measure)
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


def paper_field(cell: Cell, digits: int) -> Field:
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
    """Why a method has no number."""
    said = [words.plural(cell.diverged, "run") + " diverged"] if cell.diverged else []
    said += [words.plural(cell.open, "run") + " not finished"] if cell.open else []
    return ", ".join(said) or NO_RUNS


def _beside_n(chosen: Configuration) -> str:
    """Runs that are not in the mean, and whether those in it come from several commits or torch versions."""
    said = [f"{chosen.diverged} diverged"] if chosen.diverged else []
    said += [f"{chosen.open} not finished"] if chosen.open else []
    said += [mixed] if (mixed := mixture(chosen.counted)) else []
    return ", ".join(said)


def _remarks(column: Column) -> Sequence[str]:
    """What a reader must know about this column beyond the general explanations."""
    said = []
    experiment = column.experiment
    if experiment and experiment.paper and not column.departures:
        variant = paper_variant(experiment)
        if not experiment.paper_results(column.setup.variant):
            said.append(f"The paper's figures are for the variant {variant!r}, not for this one.")
    if unrun := [cell for cell in column.cells if cell.paper and not cell.configurations]:
        names = (f"{title(cell.method)} ({paper_field(cell, column.digits).text})" for cell in unrun)
        said.append(f"Without runs here, with the paper's figures: {', '.join(names)}.")
    reference = column.cell(column.reference)
    if reference is None or reference.chosen is None:
        said.append(f"No test: {title(column.reference)}, the reference, has no finished run here.")
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
    """Which test gave the p-values against the reference, and which methods were not tested."""
    found = {cell.method: each for cell in column.cells if (each := cell.against_reference.get("best"))}
    tested = [each for each in found.values() if each.p is not None]
    said = []
    if tested:
        said.append(
            f"Tests against {title(column.reference)}: {tested[0].test}'s, unpaired, over the {len(tested) + 1} "
            f"methods with at least two runs; the pooled variance has {tested[0].freedom:.0f} degrees of freedom."
        )
    reasons: dict[str, list[str]] = {}
    for method, each in found.items():
        if each.p is None:
            reasons.setdefault(each.reason, []).append(title(method))
    return said + [f"{', '.join(names)}: {reason}." for reason, names in reasons.items()]


def _origin(column: Column) -> str:
    """The commits and torch versions behind the numbers, with their number of runs if there are several."""
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
    """Whether the row's configuration is not the paper's, or another one has a better mean."""
    assert cell.chosen is not None
    name, other = title(cell.method), cell.better
    said = []
    if cell.chosen.untried:
        said.append(f"{name}: {words.settings(cell.chosen.untried)} is not among the paper's values.")
    found = other.mean_std("best") if other else None
    if other is None or found is None:
        return said
    text = f"{name}: a better mean, {words.spread(found, column.digits)} (n={found.n}), "
    if other.untried:
        text += f"with {words.settings(other.untried)}, which is not among the paper's values"
    else:
        text += f"with fewer seeds ({words.settings(other.hyper)})"
    test = cell.better_against_reference
    if test and test.interval:
        low, high = (words.signed(end, column.digits) for end in test.interval)
        text += f"; − {title(column.reference)}: {words.signed(test.difference, column.digits)} ({low} to {high})"
        text += f", p = {words.p_value(test)}"
    return [*said, f"{text}. The verdict and the performance profile count it."]
