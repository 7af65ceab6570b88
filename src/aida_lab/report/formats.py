"""A table as values, and as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aida_lab.report import words
from aida_lab.report.collect import Run
from aida_lab.report.columns import Cell, Column, origins
from aida_lab.report.groups import Configuration
from aida_lab.report.naming import file_name
from aida_lab.report.statistics import Comparison, MeanStd
from aida_lab.runs.files import printable
from aida_lab.spec import PaperResult

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": r"$-$", "<": "$<$", ">": "$>$",
    "≤": r"$\leq$", "×": r"$\times$", "ε": r"$\epsilon$", "–": "--", "|": r"\textbar{}",
}  # fmt: skip

#: What a spreadsheet takes for the start of a formula, the wide forms too; and the quote itself, to keep it.
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20'")


@dataclass(frozen=True)
class Field:
    text: str
    order: float | None = None  #: the sort key; None sorts by the text
    bold: bool = False
    opens: str = ""  #: the configuration whose specs and runs it opens
    quiet: bool = False  #: another field of the row opens the same, so this one is not underlined
    note: str = ""  #: small print below the text
    faint: bool = False  #: says why there is no value


Show = Callable[[Any], Field]


@dataclass(frozen=True)
class Head:
    """The head of a column; ``show`` gives the column's field for the subject of a row."""

    text: str
    show: Show | None = None
    note: str = ""  #: explains the column
    numeric: bool = True


@dataclass(frozen=True)
class Grid:
    """One table: a name for files and links, a title, rows, and remarks below it."""

    name: str
    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Field, ...], ...]
    remarks: tuple[str, ...] = ()

    def without_empty(self) -> Grid:
        """The table without columns in which no row has a value. The first two always stay."""
        kept = [
            place
            for place in range(len(self.heads))
            if place < 2 or any(row[place].text and not row[place].faint for row in self.rows)
        ]
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return replace(self, heads=tuple(self.heads[place] for place in kept), rows=rows)


def absent(text: str) -> Field:
    return Field(text, faint=True)


def grid(name: str, title: str, heads: Sequence[Head], subjects: Iterable[Any], remarks: Sequence[str] = ()) -> Grid:
    """A table with one row per subject."""
    rows = tuple(tuple(head.show(subject) for head in heads if head.show) for subject in subjects)
    return Grid(name, title, tuple(heads), rows, tuple(remarks))


def markdown(grid: Grid, level: int = 2, subtitle: str = "") -> str:
    heads = [_markdown(head.text) for head in grid.heads]
    lines = ["#" * level + " " + _markdown(grid.title), ""]
    lines += [_markdown(subtitle), ""] if subtitle else []
    lines += ["| " + " | ".join(heads) + " |"]
    lines += ["|" + "|".join("---:" if head.numeric else "---" for head in grid.heads) + "|"]
    lines += ["| " + " | ".join(_field(field, _markdown, "**%**") for field in row) + " |" for row in grid.rows]
    lines += ["", *(f"- {_markdown(remark)}" for remark in grid.remarks)] if grid.remarks else []
    return "\n".join(lines) + "\n"


def latex(grid: Grid, subtitle: str = "") -> str:
    """A ``table*`` that needs no package; wide, so in small type."""
    caption = grid.title + (f" ({subtitle})" if subtitle else "")
    lines = [
        r"\begin{table*}[t]",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\label{{tab:{file_name(grid.name)}}}",
        r"\centering\scriptsize\setlength{\tabcolsep}{3pt}",
        rf"\begin{{tabular}}{{{''.join('r' if head.numeric else 'l' for head in grid.heads)}}}",
        r"\hline",
        " & ".join(escape_latex(head.text) for head in grid.heads) + r" \\",
        r"\hline",
        *(_latex_row(row) for row in grid.rows),
        r"\hline",
        r"\end{tabular}",
        *(r"\par\smallskip " + escape_latex(remark) for remark in grid.remarks),
        r"\end{table*}",
    ]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """Text that LaTeX sets as it is, in one paragraph."""
    return "".join(_LATEX.get(letter, letter) for letter in _line(text))


def cells_csv(columns: Iterable[Column]) -> str:
    """A row for each method of each column, numbers unrounded."""
    return _csv([{**_of_column(column), **_of_cell(cell, column)} for column in columns for cell in column.cells])


def configurations_csv(columns: Iterable[Column]) -> str:
    return _csv(
        [
            {**_of_column(column), "method": cell.method, **_of_configuration(each), "chosen": each is cell.chosen}
            for column in columns
            for cell in column.cells
            for each in cell.configurations
        ]
    )


def runs_csv(runs: Sequence[Run]) -> str:
    return _csv(
        [
            {
                "run": run.key, "folder": str(run.folder), "experiment": run.spec.experiment,
                "variant": run.spec.variant, "method": run.spec.method, "seed": run.spec.seed, "state": run.state,
                "metric": run.metric, "best": run.best, "best_epoch": run.best_epoch, "last": run.last,
                "epochs_done": run.done, "epochs": run.spec.epochs, "seconds_an_epoch": run.seconds,
                "device": run.device, "precision": run.spec.precision, "commits": "; ".join(run.commits),
                "torch": "; ".join(run.torch), "remark": run.remark, **_of_hyper(run.spec.hyper),
            }
            for run in runs
        ]
    )  # fmt: skip


def _of_column(column: Column) -> dict[str, Any]:
    known = column.setup
    return {
        "table": column.experiment.table if column.experiment else "", "experiment": column.name,
        "metric": column.metric.key, "better": column.metric.better, "variant": known.variant,
        "epochs": known.epochs, "batch": known.batch, "manner": known.manner,
        "departures": "; ".join(column.departures),
    }  # fmt: skip


def _of_cell(cell: Cell, column: Column) -> dict[str, Any]:
    return {
        "method": cell.method,
        **(_of_configuration(cell.chosen) if cell.chosen else {}),
        **_of_summary("paper", cell.paper, "mean", "std", "seconds"),
        **_of_comparison("paper", cell.against_paper),
        "reference": column.reference,
        **_of_comparison("reference_best", cell.against_reference.get("best")),
        **_of_comparison("reference_last", cell.against_reference.get("last")),
        "leads": " ".join(sorted(cell.leads)),
        "configurations": cell.tried,
        "configurations_shortened": cell.elsewhere,
    }


def _of_configuration(each: Configuration) -> dict[str, Any]:
    commits, versions = origins(each.counted)
    return {
        **_of_summary("best", each.mean_std("best"), "n", "mean", "std"),
        **_of_summary("last", each.mean_std("last"), "n", "mean", "std"),
        **_of_summary("seconds", each.seconds(), "n", "mean", "std"),
        "seeds": " ".join(str(run.spec.seed) for run in each.counted),
        "diverged": each.diverged,
        "not_finished": each.open,
        "runs": " ".join(run.key for run in each.runs),
        "commits": "; ".join(sorted(commits)),
        "torch": "; ".join(sorted(versions)),
        "not_the_papers": words.settings(each.untried),
        **_of_hyper(each.hyper),
    }


def _of_hyper(hyper: Mapping[str, Any]) -> dict[str, Any]:
    return {f"hyper.{name}": value for name, value in hyper.items()}


def _of_summary(name: str, found: MeanStd | PaperResult | None, *parts: str) -> dict[str, Any]:
    return {f"{name}_{part}": getattr(found, part, None) for part in parts}


def _of_comparison(name: str, found: Comparison | None) -> dict[str, Any]:
    low, high = found.interval if found and found.interval else (None, None)
    values = (found.difference, low, high, found.test or found.reason, found.freedom, found.p) if found else [None] * 6
    parts = ("difference", "low", "high", "test", "freedom", "p")
    return {f"{name}_{part}": value for part, value in zip(parts, values, strict=True)}


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    names = dict.fromkeys(name for row in rows for name in row)
    # what all rows share comes first, the hyper-parameters of this or that optimizer last
    columns = sorted(names, key=lambda name: name.startswith("hyper."))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _inert(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _inert(value: Any) -> Any:
    """A field that no spreadsheet takes for a formula: text that begins like one, or with a quote, gets a quote first.

    A reader gets every printable text back by taking one leading quote off. Numbers stay numbers.
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    if text.lstrip()[:1] not in _FORMULA:
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _field(field: Field, escape: Callable[[str], str], bold: str) -> str:
    """Text and small print in one line; ``bold`` is the format of bold text, with % in its place."""
    text, note = escape(field.text), escape(field.note)
    text = bold.replace("%", text) if field.bold and text else text
    return f"{text} ({note})" if text and note else text or note


def _latex_row(row: Sequence[Field]) -> str:
    text = " & ".join(_field(field, escape_latex, r"\textbf{%}") for field in row) + r" \\"
    # the end of the row before would take a star or a bracket for its own
    return "{}" + text if text[0] in "*[" else text


def _markdown(text: str) -> str:
    text = _line(text)
    for letter in "\\|*_`<[":
        text = text.replace(letter, "\\" + letter)
    return text
