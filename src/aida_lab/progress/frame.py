"""What ``aida watch`` shows: a few lines per run, and a line per layer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from aida.stepsizes import LayerStepsizes, summarise
from aida_lab.progress.status import STYLES, age_in_words, in_words
from aida_lab.progress.watched import Watched
from aida_lab.runs.checks import finite

#: Heights of a trend, the full and the empty part of a bar, a cut name; on terminals without Unicode the second ones.
_HEIGHTS, _FULL, _EMPTY, _CUT = ("▁▂▃▄▅▆▇█", "_.-=+*%#"), "█#", "·.", "…~"
#: Columns of the widest trend and the widest bar.
_TREND, _WIDE_BAR = 30, 20


def frame(runs: Sequence[Watched], width: int, ascii_only: bool = False) -> list[Text]:
    """All lines: first each run, then the layers of each."""
    lines = [line for run in runs for line in _about(run, width, ascii_only)]
    for run in runs:
        if run.layers:
            title = [Text(run.name, "bold")] if len(runs) > 1 else []
            lines += [Text(), *title, *_table(run.layers, width, ascii_only)]
    for line in lines:
        line.truncate(width)
    return lines


def _about(run: Watched, width: int, ascii_only: bool) -> list[Text]:
    step = max((records[0].step for records in run.layers), default=0)
    epoch = f"epoch {run.epoch}/{run.epochs}" if run.epochs else f"epoch {run.epoch}" if run.epoch else ""
    if run.changed is None:
        words = ["nothing there yet"]
    else:
        age = f"{age_in_words(max(time.time() - run.changed, 0.0))} ago"
        words = [run.state, epoch, f"step {step:,}" if step else "", age]
    said = "".join(f"  {word}" for word in words if word)
    name = _shortened(run.name, max(8, width - len(said)), ascii_only)
    lines = [Text.assemble((name, "bold"), (said, STYLES.get(run.state, "")))]
    if run.curves:
        curves = Text(" ")
        room = max(8, min(_TREND, (width - 2) // len(run.curves) - 20))
        for name, values in run.curves.items():
            curves.append(f" {name} {in_words(values[-1]) or 'not finite'} ")
            curves.append(trend(values, room, ascii_only=ascii_only), "cyan")
        lines.append(curves)
    if run.layers:
        words = _summary([records[0] for records in run.layers])
        while len(words) > 1 and cell_len(", ".join(words)) > width - 2:
            words.pop()
        lines.append(Text(f"  {', '.join(words)}"))
    if run.problem:
        lines.append(Text(f"  {run.problem}", "red" if run.state in ("failed", "damaged") else "yellow"))
    return lines


def _summary(latest: Sequence[LayerStepsizes]) -> list[str]:
    """What is said of all layers of a run, the most important first."""
    across = summarise(latest)
    words = [", ".join(dict.fromkeys(record.method for record in latest))]
    for name in ("lr", "eps"):
        values = dict.fromkeys(finite(record.hyper.get(name)) for record in latest)
        words += [f"{name} {'/'.join(f'{each:g}' for each in values if each is not None)}"] if any(values) else []
    bounds = dict.fromkeys(record.bound for record in latest if record.bound is not None)
    words += [f"{_share(across.at_bound)} at bound {'/'.join(f'{bound:.3g}' for bound in bounds)}"] if bounds else []
    known = [record for record in latest if record.update_norm is not None and record.weight_norm is not None]
    weights, updates = (math.hypot(*(getattr(r, f"{name}_norm") for r in known)) for name in ("weight", "update"))
    words += [f"update/weight {updates / weights:.2g}"] if weights else []
    return [*words, f"spread {across.spread:.3g}"]


def _table(layers: Sequence[Sequence[LayerStepsizes]], width: int, ascii_only: bool) -> list[Text]:
    lossy = any(records[0].lost is not None for records in layers)
    extra = max(0, width - 80)
    bar, wide = min(_WIDE_BAR, 6 + extra // 10), min(_TREND, 8 + extra // 4)
    longest = max(cell_len(records[0].layer) for records in layers)
    name = max(8, min(max(longest, 5), width - (2 * wide + bar + 35 + 7 * lossy)))
    head = f"{'stepsize':>9} {'':{wide}} {'at the bound':<{bar + 8}} {'update/weight':>13} {'':{wide}}"
    head += f" {'lost':>6}" if lossy else ""
    rows = (_line(records, name, wide, bar, lossy, ascii_only) for records in layers)
    return [Text(f"{'layer':<{name}} {head}", "dim"), *rows]


def _line(records: Sequence[LayerStepsizes], name: int, wide: int, bar: int, lossy: bool, ascii_only: bool) -> Text:
    latest, past = records[0], records[::-1]
    line = Text(set_cell_size(_shortened(latest.layer, name, ascii_only), name))
    line.append(f" {latest.mean:9.3g} ", "" if math.isfinite(latest.mean) else "red")
    line.append(f"{trend([each.mean for each in past], wide, True, ascii_only):<{wide}} ", "cyan")
    full, empty = _FULL[ascii_only], _EMPTY[ascii_only]
    share = finite(latest.at_bound)
    filled = round(min(max(share or 0.0, 0.0), 1.0) * bar)
    line.append(" " * bar if share is None else full * filled + empty * (bar - filled), "yellow")
    line.append(f" {_share(latest.at_bound):>7}")
    ratio = latest.update_ratio
    line.append(f" {'' if ratio is None else f'{ratio:.2g}':>13} ")
    line.append(f"{trend([each.update_ratio for each in past], wide, True, ascii_only):<{wide}}", "cyan")
    if lossy:
        line.append(f" {_share(latest.lost):>6}", "red" if (latest.lost or 0) >= 0.1 else "")
    return line


def _shortened(name: str, width: int, ascii_only: bool) -> str:
    """A name without its beginning: the end tells layers, and folders, apart."""
    if cell_len(name) <= width:
        return name
    while cell_len(name) >= width:
        name = name[1:]
    return _CUT[ascii_only] + name


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3g} %"


def trend(values: Iterable[float | None], width: int, log: bool = False, ascii_only: bool = False) -> str:
    """Values as a line of small bars, from the oldest on. ``x`` stands for a value that is not finite.

    Of too many values some are left out, but not the last. ``log``: by powers of ten if they differ that much.
    """
    values = list(values)
    if len(values) > width:
        values = [values[(place + 1) * len(values) // width - 1] for place in range(width)]
    known = [each for each in values if each is not None and math.isfinite(each)]
    if not known:
        return "x" * len(values)
    low, high = min(known), max(known)
    if log and 0 < 10 * low < high:
        return trend((math.log(each) if each and each > 0 else None for each in values), width, ascii_only=ascii_only)
    heights = _HEIGHTS[ascii_only]

    def height(value: float) -> str:
        return heights[round((value - low) / (high - low) * (len(heights) - 1))] if high > low else heights[3]

    return "".join("x" if each is None or not math.isfinite(each) else height(each) for each in values)
