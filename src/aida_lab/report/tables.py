"""The tables of a report: methods against the paper, the paper's own layout, searches, excluded runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from aida_lab.report import words
from aida_lab.report.columns import NOT_THE_PAPERS, Cell, Column, mixture, origins
from aida_lab.report.formats import Field, Grid, Head, Show, absent, grid
from aida_lab.report.groups import Configuration, Measure
from aida_lab.report.naming import ordered, title
from aida_lab.report.results import Results, Table
from aida_lab.report.statistics import LEVEL, Comparison

NO_RUNS = "no runs"

_BOLD_MEAN = (
    f"Bold mean: the best of its column, and significantly different (p < {LEVEL}) from every other method without "
    "diverged seeds."
)
_BOLD_P = f"Bold p-value: below {LEVEL}."


#: Why a run in this state does not count, unless its folder says more.
_STATES = {
    "diverged": "ended without a usable loss",
    "running": "a process is training it",
    "stopped": "not finished; the same command resumes it",
    "failed": "the last attempt failed; the same command retries it",
    "finished": "finished",
}


def comparison(column: Column) -> Grid:
    """One column in full: each method with runs beside the paper's figure, and against the reference."""
    reference, metric, digits = title(column.reference), column.metric.title, column.digits
    cells = [cell for cell in column.cells if cell.configurations]
    best_alone = any(cell.paper.best for cell in cells if cell.paper)

    def mean(measure: Measure) -> Show:
        return lambda cell: _mean(cell, measure, digits)

    def difference(cell: Cell) -> Field:
        if cell.method == column.reference and cell.chosen:
            return absent("reference")
        return _opening(cell, _difference(cell.against_reference.get("best"), digits))

    def p(measure: Measure) -> Show:
        return lambda cell: _opening(cell, _p(cell.against_reference.get(measure)))

    timing = "training seconds per epoch: median of a run, mean over seeds; runs that shared a device are not timed"
    heads = [
        Head("method", _method, numeric=False),
        Head(
            "best epoch", mean("best"), f"mean ± std over seeds of {metric} at each run's best epoch, and which it was"
        ),
        Head("n", _number, "number of seeds"),
        Head("last epoch", mean("last"), f"mean ± std over seeds of {metric} after the last epoch"),
        Head("s / epoch", _seconds, timing),
    ]
    if best_alone:
        note = "the best of all seeds and configurations, as in the paper's Table IV"
        heads.append(Head("best run", lambda cell: _best_run(cell, column), note))
    if any(cell.paper for cell in cells):
        figure = "the best of all runs" if best_alone else "mean ± std of three repetitions"
        minus = "our best run minus the paper's" if best_alone else "at the best epoch"
        welch = "Welch's test against the paper's mean and std, not adjusted"
        heads += [
            Head("paper", lambda cell: paper_field(cell, digits), figure),
            Head("ours − paper", lambda cell: _opening(cell, _difference(cell.against_paper, digits)), minus),
            # not bold: these p-values are not adjusted for their number
            Head("p, paper", lambda cell: _opening(cell, replace(_p(cell.against_paper), bold=False)), welch),
        ]
    minus = f"mean minus that of {reference}, at the best epoch, with its simultaneous 95 % confidence interval"
    test = f"Dunnett's test against {reference}"
    tried = "sets of hyper-parameters that were tried; in small print those tried in shortened runs"
    heads += [
        Head(f"− {reference}", difference, minus),
        Head("p, best", p("best"), f"{test} at the best epoch, adjusted for all methods of this table"),
        Head("p, last", p("last"), f"{test} after the last epoch, adjusted in the same way"),
        Head("tried", _tried, tried),
    ]
    remarks = _remarks(column) if any(cell.chosen for cell in column.cells) else ["No finished run yet."]
    return grid(column.id, column.title, heads, cells, remarks).without_empty()


def overview(table: Table) -> Grid:
    """The paper's own layout: one row per method, one column per experiment, our mean above the paper's."""

    def field(method: str, column: Column) -> Field:
        cell = column.cell(method)
        return _overview(cell, column) if cell else absent(NO_RUNS)

    heads = [Head("method", lambda method: Field(title(method)), numeric=False)]
    for column in table.columns:
        note = f"{column.metric.title}; {column.metric.better} is better; {column.setup.manner}"
        heads.append(Head(column.title, partial(field, column=column), note))
    cells = [cell for column in table.columns for cell in column.cells]
    leads = any("best" in cell.leads for cell in cells)
    methods = ordered(cell.method for cell in cells if cell.configurations)
    return grid(table.name, table.title, heads, methods, [_BOLD_MEAN] if leads else [])


def search(column: Column) -> Grid:
    """Every configuration of a column: what each method's number was chosen from."""
    varied = {cell.method: _varied(cell) for cell in column.cells}

    def settings(each: Configuration) -> Field:
        shown = {name: each.hyper.get(name) for name in varied[each.method]}
        return Field(words.settings(shown) or "the only one", opens=each.id)

    def mean(each: Configuration, measure: Measure, missing: str) -> Field:
        found = each.mean_std(measure)
        return Field(words.spread(found, column.digits), found.mean, opens=each.id) if found else absent(missing)

    def standing(each: Configuration) -> Field:
        cell = column.cell(each.method)
        said = ["chosen"] if cell and each is cell.chosen else []
        return Field("; ".join(said + ([NOT_THE_PAPERS] if each.untried else [])))

    differ, above = "those that differ between its configurations", "chosen: shown in the table above"
    heads = [
        Head("method", _method, numeric=False),
        Head("hyper-parameters", settings, differ, numeric=False),
        Head("best epoch", partial(mean, measure="best", missing="none finished")),
        Head("n", lambda each: Field(str(len(each.counted)), len(each.counted))),
        Head("last epoch", partial(mean, measure="last", missing="")),
        Head("diverged", lambda each: Field(str(each.diverged or ""), each.diverged)),
        Head("not finished", lambda each: Field(str(each.open or ""), each.open)),
        Head("remark", standing, above, numeric=False),
    ]
    name, about = f"search-{column.id}", f"{column.title}: every configuration"
    return grid(name, about, heads, column.configurations).without_empty()


def searched(column: Column) -> bool:
    """Whether several configurations of some method were tried."""
    return any(len(cell.configurations) > 1 for cell in column.cells)


def excluded(results: Results) -> Grid:
    """The runs and folders that are excluded from every mean, each with the reason."""
    texts = ("folder", "what", "experiment", "method", "seed", "epochs", "why it does not count")
    heads = [Head(text, numeric=text in ("seed", "epochs")) for text in texts]
    owners = {run.key: each.id for column in results.columns for each in column.configurations for run in each.runs}
    rows = [
        (Field(str(each.folder)), Field("not read"), *[absent("")] * 4, Field(each.problem))
        for each in results.collection.unread
    ]
    repeats = {run.key for column in results.columns for each in column.configurations for run in each.repeats}
    for run in results.collection.runs:
        if run.counts and run.key not in repeats:
            continue
        what, why = str(run.state), run.remark or _STATES.get(run.state, "")
        if run.key in repeats:
            what, why = "repeat", "the same seed again, which counts once; the two differ only in the stepsize probe"
        seed = Field(str(run.spec.seed), run.spec.seed, opens=owners.get(run.key, ""))
        epochs = Field(f"{run.done} of {run.spec.epochs}", run.done)
        named = (Field(str(run.folder)), Field(what), Field(run.spec.experiment), Field(title(run.spec.method)))
        rows.append((*named, seed, epochs, Field(why)))
    return Grid("excluded", "Excluded runs", tuple(heads), tuple(rows))


def skipped(results: Results) -> list[str]:
    """Folders that could not be used, one line per folder; the table of excluded runs lists all."""
    found = [f"{each.folder}: {each.problem}" for each in results.collection.unread]
    broken = ("damaged", "other metric", "two results")
    return found + [f"{run.folder}: {run.remark}" for run in results.collection.runs if run.state in broken]


def census(results: Results) -> str:
    """How many runs in which state, in words."""
    runs, unread = results.collection.runs, results.collection.unread
    states = Counter("without a number" if run.state == "finished" and not run.counts else run.state for run in runs)
    said = [f"{count:,} {state}" for state, count in sorted(states.items(), key=lambda item: (-item[1], item[0]))]
    said += [words.plural(len(unread), "folder") + " not read"] if unread else []
    return ", ".join(said) or "no runs"


# --- fields ---


def _method(each: Cell | Configuration) -> Field:
    return Field(title(each.method))


def _opening(cell: Cell, field: Field) -> Field:
    """A field with a value, with a link to the method's runs."""
    return field if cell.chosen is None or field.order is None else replace(field, opens=cell.chosen.id, quiet=True)


def _mean(cell: Cell, measure: Measure, digits: int) -> Field:
    """The mean; of the best epoch with the epoch, or with the reason why there is none."""
    found, first = cell.mean_std(measure), measure == "best"
    if found is None or cell.chosen is None:
        return absent(_why_empty(cell) if first else "")
    epochs = [run.best_epoch for run in cell.chosen.counted if first and run.best_epoch is not None]
    note = f"epoch {sum(epochs) / len(epochs):.0f}" if epochs else ""
    return Field(words.spread(found, digits), found.mean, measure in cell.leads, cell.chosen.id, note=note)


def _number(cell: Cell) -> Field:
    """The number of seeds; those not in the mean; and whether they come from several commits or torch versions."""
    if cell.chosen is None:
        return absent("")
    n, mixed = len(cell.chosen.counted), mixture(cell.chosen.counted)
    said = [f"{cell.chosen.diverged} diverged"] if cell.chosen.diverged else []
    said += [f"{cell.chosen.open} not finished"] if cell.chosen.open else []
    return _opening(cell, Field(str(n), n, note=", ".join([*said, *([mixed] if mixed else [])])))


def _seconds(cell: Cell) -> Field:
    if cell.chosen is None:
        return absent("")
    ours = cell.chosen.seconds()
    paper = cell.paper.seconds if cell.paper else None
    note = f"paper {words.seconds(paper)}" if paper is not None else ""
    if ours is None:
        return Field("not timed", note=note, faint=True)
    return _opening(cell, Field(words.seconds(ours.mean), ours.mean, note=note))


def _best_run(cell: Cell, column: Column) -> Field:
    if cell.chosen is None:
        return absent("")
    value, configuration = cell.best_run(column.metric)
    return Field(words.number(value, column.digits), value, opens=configuration.id)


def paper_field(cell: Cell, digits: int) -> Field:
    if cell.paper is None:
        return absent("not in the paper")
    return Field(words.spread(cell.paper, digits), cell.paper.mean)


def _difference(found: Comparison | None, digits: int) -> Field:
    if found is None:
        return absent("")
    return Field(words.signed(found.difference, digits), found.difference, note=words.interval(found, digits))


def _p(found: Comparison | None) -> Field:
    if found is None or found.p is None:
        return absent(words.p_value(found))
    return Field(words.p_value(found), found.p, bold=found.significant)


def _tried(cell: Cell) -> Field:
    note = f"{cell.elsewhere} shortened" if cell.elsewhere else ""
    return Field(str(cell.tried or ""), cell.tried or None, note=note)


def _overview(cell: Cell, column: Column) -> Field:
    paper = f"paper {paper_field(cell, column.digits).text}" if cell.paper else ""
    field = mean_and_seeds(cell, column)
    if cell.chosen is None:
        return replace(field, note=paper)
    said = [field.text, NOT_THE_PAPERS if cell.chosen.untried else "", mixture(cell.chosen.counted)]
    return replace(field, text=", ".join(filter(None, said)), note=paper)


def mean_and_seeds(cell: Cell, column: Column) -> Field:
    """The mean with the number of seeds in it, and of diverged seeds that are not; or why there is none."""
    found = cell.mean_std("best")
    if cell.chosen is None or found is None:
        return absent(_why_empty(cell))
    text = f"{words.spread(found, column.digits)}, n={found.n}"
    text += f", {cell.chosen.diverged} diverged" if cell.chosen.diverged else ""
    return Field(text, found.mean, "best" in cell.leads, cell.chosen.id)


def _why_empty(cell: Cell) -> str:
    """Why a method has no number."""
    said = [words.plural(cell.diverged, "run") + " diverged"] if cell.diverged else []
    said += [words.plural(cell.open, "run") + " not finished"] if cell.open else []
    return ", ".join(said) or NO_RUNS


def _varied(cell: Cell) -> list[str]:
    """The hyper-parameters in which the method's configurations differ."""
    names = dict.fromkeys(name for each in cell.configurations for name in each.hyper)
    return [name for name in names if len({repr(each.hyper.get(name)) for each in cell.configurations}) > 1]


# --- remarks ---


def _remarks(column: Column) -> Sequence[str]:
    """What a reader must know about this column beyond the general explanations."""
    said = []
    experiment = column.experiment
    published = experiment is not None and bool(experiment.paper) and not column.departures
    if experiment and published and not experiment.paper_results(column.setup.variant):
        said.append(f"The paper's figures are for the variant {experiment.paper_variant!r}, not for this one.")
    if unrun := [cell for cell in column.cells if cell.paper and not cell.configurations]:
        names = (f"{title(cell.method)} ({paper_field(cell, column.digits).text})" for cell in unrun)
        said.append(f"Without runs here, with the paper's figures: {', '.join(names)}.")
    reference = column.cell(column.reference)
    if reference is None or reference.chosen is None:
        said.append(f"No test: {title(column.reference)}, the reference, has no finished run here.")
    if seeds := sorted({seed for cell in column.cells if cell.chosen for seed in cell.chosen.tuning_seeds}):
        tuned = [title(cell.method) for cell in column.cells if cell.chosen and cell.chosen.tuning_seeds]
        named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        said.append(f"Tuned with {named}, which no mean contains: {', '.join(tuned)}.")
    for method, count in Counter(each.method for each in column.sweeps if each.tuned).items():
        if count > 1:
            said.append(
                f"{title(method)}: the best of {count} tuned variants; the table of the tuning has each of them."
            )
    said += _tests(column)
    for cell in column.cells:
        said += _passed_over(cell, column)
    said.append(_origin(column))
    places = sorted({run.device for run in column.counted if run.device})
    if len(places) > 1:
        said.append(f"Times come from different devices, so do not compare them: {', '.join(places)}.")
    said += [experiment.notes] if experiment and experiment.notes else []
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
    commits, versions = origins(column.counted)
    short = {words.commit(name): count for name, count in commits.items()}
    shown = [
        ", ".join(
            f"{name} ({words.plural(count, 'run')})" if len(found) > 1 else name
            for name, count in sorted(found.items(), key=lambda item: (-item[1], item[0]))
        )
        for found in (short, versions)
    ]
    mixed = f"Mixes {column.mixed}. " if column.mixed else ""
    return f"{mixed}Commit: {shown[0]}. torch: {shown[1]}."


def _passed_over(cell: Cell, column: Column) -> list[str]:
    """Whether the row's configuration is not the paper's, or another one has a better mean."""
    name, other = title(cell.method), cell.better
    said = []
    if cell.chosen and cell.chosen.untried:
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
        difference = f"{words.signed(test.difference, column.digits)} ({words.interval(test, column.digits)})"
        text += f"; − {title(column.reference)}: {difference}, p = {words.p_value(test)}"
    return [*said, f"{text}. The verdict and the performance profile count it."]
