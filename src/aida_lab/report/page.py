"""The page: text, tables, charts and scripts in one file that loads nothing else."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from aida._version import __version__
from aida.stepsizes.drawing import COLOURS, DARK_COLOURS
from aida_lab.report import charts, profile, tables, tuning, verdict, words
from aida_lab.report.collect import Run
from aida_lab.report.columns import Column
from aida_lab.report.groups import Configuration
from aida_lab.report.naming import DASHES, MARKERS, looks, title
from aida_lab.report.results import Results
from aida_lab.report.statistics import LEVEL, PAPER_REPETITIONS
from aida_lab.runs.files import in_json, is_archive
from aida_lab.runs.records import SPEC

if TYPE_CHECKING:
    from jinja2 import Environment

#: In this order: later files use what earlier ones define.
_SCRIPTS = ("scales.js", "marks.js", "chart.js", "runs.js", "main.js")

#: Bytes of figures in the page; further figures are only linked.
_EMBEDDED = 4_000_000

#: What the figures of stepsizes show, by the name of the file.
_ABOUT = {
    "figure-1": "As the paper's Figure 1: layerwise means of the adaptive stepsizes",
    "figure-2": "As the paper's Figure 2: layerwise standard deviations of the adaptive stepsizes",
    "figure-3": "As the paper's Figure 3: layerwise means, AdaBelief* and AdaBelief",
    "figure-adam-plus": "As the paper's figure of Adam+: layerwise means, Adam and Adam+",
    "all": "Adaptive stepsizes of every method that was measured, layerwise means and standard deviations",
}


def page(results: Results, making: Path, out: Path, stepsizes: Iterable[Path], problems: Sequence[str]) -> str:
    """The text of ``index.html`` in the folder ``out``.

    ``stepsizes`` are the figures already drawn below ``making``; ``problems`` says which could not be drawn.
    """
    # a report of other experiments does not name the paper's tables without runs
    missing = [each for each in results.paper if not each.columns] if _about_the_paper(results) else []
    return _environment().get_template("page.html.jinja").render(
        results=results,
        title=title(results.reference),
        heading=_heading(results),
        judged=_judged(results),
        looks=looks(results.names),
        missing=missing,
        problems=problems,
        places={column.id: place for place, column in enumerate(results.columns) if column.finished},
        pictures=_pictures(stepsizes, making),
        profile=profile.profile(results.comparable),
        definition=profile.DEFINITION,
        level=LEVEL,
        repetitions=PAPER_REPETITIONS,
        version=__version__,
        plural=words.plural,
        tables=tables,
        tuning=tuning.tuning,
        verdict=verdict,
        style=_palette() + _asset("style.css"),
        script="\n".join(_asset(name) for name in _SCRIPTS),
        data=_embedded(payload(results, out)),
    )  # fmt: skip


def _about_the_paper(results: Results) -> bool:
    """Whether any of the paper's tables has runs, or there are no runs at all."""
    return any(table.columns for table in results.paper) or not results.columns


def _judged(results: Results) -> list[Column]:
    """The columns of the verdict: experiments as declared if there are any, with a finished run of the reference."""
    finished = [each for each in results.comparable or results.columns if each.finished]
    own = [each for each in finished if (cell := each.cell(each.reference)) and cell.chosen]
    return own or finished


def _heading(results: Results) -> str:
    if _about_the_paper(results):
        return "Optimizers compared: our runs and the paper's tables"
    tasks = list(dict.fromkeys(each.experiment.title if each.experiment else each.name for each in results.columns))
    on = tasks[0] if len(tasks) == 1 else words.plural(len(tasks), "task")
    return f"{words.plural(len(results.measured), 'optimizer')} on {on}"


def _palette() -> str:
    """The methods' colours as CSS variables, for light and dark pages."""
    light, dark = (
        "".join(f"--c{place}: {colour.lower()}; " for place, colour in enumerate(colours))
        for colours in (COLOURS, DARK_COLOURS)
    )
    return f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"


def _pictures(drawn: Iterable[Path], out: Path) -> list[dict[str, str]]:
    """The figures of stepsizes; ``source`` is a data: address, empty if it would make the page too heavy."""
    found = []
    left = _EMBEDDED
    for svg in (path for path in drawn if path.suffix == ".svg"):
        size = svg.stat().st_size * 4 // 3
        source = ""
        if size <= left:
            left -= size
            source = "data:image/svg+xml;base64," + base64.b64encode(svg.read_bytes()).decode()
        place, column = svg.relative_to(out).as_posix(), svg.parent.name.removeprefix("stepsizes-")
        about, png = _ABOUT.get(svg.stem, svg.stem), place[:-3] + "png"
        found.append({"column": column, "about": about, "source": source, "png": png, "svg": place})
    return found


# --- what the page's scripts read ---


def payload(results: Results, out: Path) -> dict[str, Any]:
    """Runs, configurations and charts as plain values; links to run folders start from ``out``."""
    runs: list[dict[str, Any]] = []
    configurations: dict[str, Any] = {}
    columns = []
    for index, column in enumerate(results.columns):
        epochs = charts.shown_epochs(column, len(results.collection.runs))
        for each in column.configurations:
            known = (*each.runs, *each.repeats)
            numbers = list(range(len(runs), len(runs) + len(known)))
            configurations[each.id] = {"column": index, **_configuration(each, column), "runs": numbers}
            runs += [_run(run, epochs, out) for run in known]
        views = [charts.in_json(each, _rounded) for each in charts.views(column, epochs)]
        metric, named = column.metric, {"id": column.id, "title": column.title}
        shown = {"metric": metric.title, "better": metric.better, "digits": column.digits, "epochs": epochs}
        columns.append({**named, **shown, "views": views})
    found = profile.profile(results.comparable)
    return {
        "methods": {
            method: {"title": title(method), **look._asdict()} for method, look in looks(results.names).items()
        },
        "dashes": DASHES,
        "markers": MARKERS,
        "columns": columns,
        "configurations": configurations,
        "runs": runs,
        "profile": charts.in_json(charts.profile_chart(found), _rounded) if found else None,
    }


def _configuration(each: Configuration, column: Column) -> dict[str, Any]:
    content = each.spec.to_json()
    del content["seed"], content["probe_every"]
    facts = {
        f"{column.metric.title}, best epoch": words.spread(each.mean_std("best"), column.digits) or "none",
        "last epoch": words.spread(each.mean_std("last"), column.digits) or "none",
        "seeds": str(len(each.counted)),
        "seconds per epoch": words.spread(each.seconds(), 2) or "not timed",
        "hyper-parameters": words.settings(each.hyper),
    }
    return {"method": each.method, "spec": in_json(content), "facts": facts}


def _run(run: Run, epochs: Sequence[int], out: Path) -> dict[str, Any]:
    where = {epoch: index for index, epoch in enumerate(run.curve.epochs)}
    curve = [run.curve.metric[where[epoch]] for epoch in epochs if epoch in where]
    shown = [None if value is None else _rounded(value) for value in curve]
    return {
        "key": run.key,
        "seed": run.spec.seed,
        "probe": run.spec.probe_every,
        "state": run.state,
        "best": run.best,
        "bestEpoch": run.best_epoch,
        "last": run.last,
        "done": run.done,
        "seconds": None if run.seconds is None else _rounded(run.seconds),
        "device": run.device,
        "commit": ", ".join(map(words.commit, run.commits)),
        "torch": ", ".join(run.torch),
        "remark": run.remark,
        "link": _address(run.folder.parent if is_archive(run.folder.parent) else run.folder / SPEC, out),
        "metric": shown if any(value is not None for value in shown) else None,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _address(path: Path, out: Path) -> str:
    """A file as seen from the page, for a link."""
    try:
        return quote(os.fsencode(Path(os.path.relpath(path, out)).as_posix()))
    except ValueError:  # another drive
        return path.resolve().as_uri()


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end its script element early."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _asset(name: str) -> str:
    return (resources.files("aida_lab.report") / "assets" / name).read_text(encoding="utf-8")
