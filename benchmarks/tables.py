"""The results as Markdown: one table of times, and what stands behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from results import Entry
from rivals import AIDA_CLIP, AIDA_FUSED, BASELINE, CLIP_BASELINE

Cell = Callable[[Entry], str]


def markdown(entries: list[Entry], machine: dict[str, Any], copy_bytes_per_second: float | None) -> str:
    """All tables; without bandwidths if that of a copy is None."""
    notes = _notes(entries)
    times = _table(entries, lambda entry: _time(entry, entries, notes))
    parts = [
        "# Time of an optimizer step",
        _facts(machine, copy_bytes_per_second),
        "Median milliseconds a step ± half the distance between the quartiles"
        f" (times that of {BASELINE} in the same mode). An empty cell is not part of the comparison.",
        times,
        *(f"[{number}] {reason}" for reason, number in notes.items()),
        *_headlines(entries),
    ]
    if copy_bytes_per_second is not None:
        copy_rate = copy_bytes_per_second
        parts += [
            "## Bandwidth",
            "GB/s if a step moves what it must and no more, and the share of a copy's bandwidth that is.",
            _table(entries, lambda entry: _rate(entry, copy_rate)),
        ]
    if any(entry.peak_temporary is not None for entry in entries):
        parts += [
            "## Temporary memory",
            "Most bytes a step allocates beyond parameters, gradients and state, in units of the parameters' bytes.",
            _table([entry for entry in entries if entry.peak_temporary is not None], _peak),
        ]
    return "\n\n".join(parts) + "\n"


def _facts(machine: dict[str, Any], copy_bytes_per_second: float | None) -> str:
    known = [f"- {name}: {value}" for name, value in machine.items() if value is not None]
    if copy_bytes_per_second is not None:
        known.append(f"- copy bandwidth: {copy_bytes_per_second / 1e9:.0f} GB/s, reads and writes")
    return "\n".join(known)


def _table(entries: list[Entry], cell: Cell) -> str:
    """Optimizers down, workloads across."""
    columns = list(dict.fromkeys(entry.workload for entry in entries))
    rows = dict.fromkeys((entry.mode, entry.optimizer) for entry in entries)
    found = {(entry.mode, entry.optimizer, entry.workload): entry for entry in entries}
    lines = [
        " | ".join(["| mode", "optimizer", *columns]) + " |",
        "|---|---|" + "---:|" * len(columns),
    ]
    for mode, optimizer in sorted(rows, key=lambda row: row[0]):
        cells = [
            cell(entry) if (entry := found.get((mode, optimizer, column))) is not None else "" for column in columns
        ]
        lines.append(" | ".join([f"| {mode}", optimizer, *cells]) + " |")
    return "\n".join(lines)


def _notes(entries: list[Entry]) -> dict[str, int]:
    reasons = dict.fromkeys(entry.error for entry in entries if entry.error is not None)
    return {reason: number for number, reason in enumerate(reasons, 1)}


def _time(entry: Entry, entries: list[Entry], notes: dict[str, int]) -> str:
    why = f"none [{notes[entry.error]}]" if entry.error is not None else ""
    if entry.ms is None:
        return why
    spread = f" ± {entry.spread:.0%}" if entry.spread is not None else ""
    ratio = _ratio(entries, entry, BASELINE)
    return " ".join(filter(None, [f"{_short(entry.ms)}{spread}", ratio and f"({ratio})", why]))


def _rate(entry: Entry, copy_bytes_per_second: float) -> str:
    rate = entry.bytes_per_second
    if not rate:
        return ""
    return f"{_short(rate / 1e9)} ({rate / copy_bytes_per_second:.0%} at {entry.bytes_per_param} B)"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _peak(entry: Entry) -> str:
    return f"{entry.peak_temporary:.3f}"


def _ratio(entries: list[Entry], entry: Entry, baseline: str) -> str:
    base = next(
        (e for e in entries if (e.workload, e.mode, e.optimizer) == (entry.workload, entry.mode, baseline)), None
    )
    if base is None or base.ms is None or entry.ms is None:
        return ""
    return f"{entry.ms / base.ms:.2f}×"


def _headlines(entries: list[Entry]) -> list[str]:
    """The comparisons that a reader looks for, in words."""
    lines = [
        f"- {optimizer} / {baseline}, {entry.mode}, {entry.workload}: {ratio}"
        for optimizer, baseline in ((AIDA_FUSED, BASELINE), (AIDA_CLIP, CLIP_BASELINE))
        for entry in entries
        if entry.optimizer == optimizer and (ratio := _ratio(entries, entry, baseline))
    ]
    lines += _group_headlines(entries)
    return ["## Ratios", "\n".join(lines)] if lines else []


def _group_headlines(entries: list[Entry]) -> list[str]:
    """Many groups against one: entries of the same parameters, mode and optimizer on two workloads."""
    lines = []
    for many in entries:
        for one in entries:
            same = (one.params, one.mode, one.optimizer) == (many.params, many.mode, many.optimizer)
            if same and one.groups < many.groups and one.ms is not None and many.ms is not None:
                lines.append(
                    f"- {many.optimizer}, {many.mode}: {many.groups} groups / 1 group: {many.ms / one.ms:.2f}×"
                )
    return lines
