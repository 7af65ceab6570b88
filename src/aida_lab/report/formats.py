"""Tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from aida_lab.report import words
from aida_lab.report.collect import Run
from aida_lab.report.columns import Cell, Column
from aida_lab.report.grids import Field, Grid
from aida_lab.report.groups import Configuration
from aida_lab.report.naming import file_name
from aida_lab.report.statistics import Comparison, MeanStd
from aida_lab.runs.files import printable

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": r"$-$", "<": "$<$", ">": "$>$",
    "≤": r"$\leq$", "×": r"$\times$", "ε": r"$\epsilon$", "–": "--", "|": r"\textbar{}",
}  # fmt: skip

#: What a spreadsheet takes for the start of a formula, the wide forms too; and the quote itself, to keep it.
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20'")


def markdown(grid: Grid, level: int = 2, subtitle: str = "") -> str:
    heads = [_markdown(head.text) for head in grid.heads]
    lines = ["#" * level + " " + _markdown(grid.title), ""]
    lines += [_markdown(subtitle), ""] if subtitle else []
    lines += ["| " + " | ".join(heads) + " |"]
    lines += ["|" + "|".join("---:" if head.numeric else "---" for head in grid.heads) + "|"]
    lines += ["| " + " | ".join(_markdown_field(field) for field in row) + " |" for row in grid.rows]
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
    rows = []
    for column in columns:
        for cell in column.cells:
            for each in cell.configurations:
                chosen = {"chosen": each is cell.chosen}
                rows.append({**_of_column(column), "method": cell.method, **_of_configuration(each), **chosen})
    return _csv(rows)


def runs_csv(runs: Sequence[Run]) -> str:
    return _csv(
        [
            {
                "run": run.key, "folder": str(run.folder), "experiment": run.spec.experiment,
                "variant": run.spec.variant, "method": run.spec.method, "seed": run.spec.seed, "state": run.state,
                "metric": run.metric, "best": run.best, "best_epoch": run.best_epoch, "last": run.last,
                "epochs_done": run.curve.epochs[-1] if run.curve.epochs else 0, "epochs": run.spec.epochs,
                "seconds_an_epoch": run.seconds, "device": run.device, "precision": run.spec.precision,
                "commits": "; ".join(run.commits), "torch": "; ".join(run.torch),
                "remark": run.remark, **{f"hyper.{name}": value for name, value in run.spec.hyper.items()},
            }
            for run in runs
        ]
    )  # fmt: skip


def _of_column(column: Column) -> dict[str, Any]:
    known = column.setup
    return {
        "table": column.experiment.table if column.experiment else "",
        "experiment": column.name,
        "metric": column.metric.key,
        "better": column.metric.better,
        "variant": known.variant,
        "epochs": known.epochs,
        "batch": known.batch,
        "manner": known.manner,
        "departures": "; ".join(column.departures),
    }


def _of_cell(cell: Cell, column: Column) -> dict[str, Any]:
    paper = cell.paper
    return {
        "method": cell.method,
        **(_of_configuration(cell.chosen) if cell.chosen else {}),
        "paper_mean": paper.mean if paper else None,
        "paper_std": paper.std if paper else None,
        "paper_seconds": paper.seconds if paper else None,
        **_of_comparison("paper", cell.against_paper),
        "reference": column.reference,
        **_of_comparison("reference_best", cell.against_reference.get("best")),
        **_of_comparison("reference_last", cell.against_reference.get("last")),
        "leads": " ".join(sorted(cell.leads)),
        "configurations": cell.tried,
        "configurations_shortened": cell.elsewhere,
    }


def _of_configuration(each: Configuration) -> dict[str, Any]:
    return {
        **_of_summary("best", each.mean_std("best")),
        **_of_summary("last", each.mean_std("last")),
        **_of_summary("seconds", each.seconds()),
        "seeds": " ".join(str(run.spec.seed) for run in each.counted),
        "diverged": each.diverged,
        "not_finished": each.open,
        "runs": " ".join(run.key for run in each.runs),
        "commits": "; ".join(each.commits),
        "torch": "; ".join(each.torch),
        "not_the_papers": words.settings(each.untried),
        **{f"hyper.{name}": value for name, value in each.hyper.items()},
    }


def _of_summary(name: str, found: MeanStd | None) -> dict[str, Any]:
    return {f"{name}_{part}": getattr(found, part, None) for part in ("n", "mean", "std")}


def _of_comparison(name: str, found: Comparison | None) -> dict[str, Any]:
    low, high = found.interval if found and found.interval else (None, None)
    return {
        f"{name}_difference": found.difference if found else None,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_test": (found.test or found.reason) if found else None,
        f"{name}_freedom": found.freedom if found else None,
        f"{name}_p": found.p if found else None,
    }


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


def _markdown_field(field: Field) -> str:
    text = _markdown(field.text)
    text = f"**{text}**" if field.bold and text else text
    return f"{text} ({_markdown(field.note)})" if field.note and text else text or _markdown(field.note)


def _latex_row(row: Sequence[Field]) -> str:
    text = " & ".join(map(_latex_field, row)) + r" \\"
    # the end of the row before would take a star or a bracket for its own
    return "{}" + text if text[0] in "*[" else text


def _latex_field(field: Field) -> str:
    text = escape_latex(field.text)
    text = rf"\textbf{{{text}}}" if field.bold and text else text
    return f"{text} ({escape_latex(field.note)})" if field.note and text else text or escape_latex(field.note)


def _markdown(text: str) -> str:
    text = _line(text)
    for letter in "\\|*_`<[":
        text = text.replace(letter, "\\" + letter)
    return text
