"""A method's title, order and look, the same in every table, in every figure and on the page."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple

from aida.catalog import catalog
from aida_lab.report.words import by_value

#: Colour (an index of :data:`aida.stepsizes.drawing.COLOURS`) and dash of each known method.
_KNOWN = {
    "aida-k2": (1, 0), "aida-k1": (4, 0), "adabelief": (0, 0), "adabelief-star": (0, 1), "adam": (2, 0),
    "adamw": (7, 0), "adam-plus": (2, 1), "radam": (5, 0), "sgd": (6, 0), "fromage": (6, 1), "yogi": (3, 0),
    "msvag": (9, 0), "adabound": (8, 0),
}  # fmt: skip

#: Lengths of strokes and gaps, in widths of the line.
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.6), (1, 1.4), (6, 1.4, 1, 1.4))


Outline = tuple[tuple[float, float], ...]


def _polygon(corners: int, inner: float = 1.0, turn: float = 0.0, size: float = 1.15) -> Outline:
    """A regular polygon, or a star if every second corner is at ``inner``. y points up."""

    def corner(place: int) -> tuple[float, float]:
        angle, radius = 2 * math.pi * (place / corners + turn), size * (inner if place % 2 else 1.0)
        return round(radius * math.sin(angle), 3), round(radius * math.cos(angle), 3)

    return tuple(map(corner, range(corners)))


#: The outline that goes with each colour, so that methods also differ in shape.
MARKERS = (
    _polygon(20, size=1.0), _polygon(4, size=1.3), _polygon(4, turn=1 / 8, size=1.35), _polygon(3),
    _polygon(3, turn=1 / 2), _polygon(8, 0.4, size=1.35), _polygon(8, 0.4, 1 / 8, 1.35), _polygon(3, turn=1 / 4),
    _polygon(6), _polygon(10, 0.45, size=1.4),
)  # fmt: skip


class Look(NamedTuple):
    colour: int  #: index of the colour and of the marker
    dash: int


def title(method: str) -> str:
    """``Aida (K=2)`` for ``aida-k2``, the catalog's title for a name of the catalog, the class for any other.

    A space separates a method from values that distinguish it: ``Aida (K=2), eps 1e-12`` for ``aida-k2 eps 1e-12``.
    """
    method, _, values = method.partition(" ")
    if values:
        return f"{title(method)}, {values}"
    if match := re.fullmatch(r"aida-k(\d+)", method):
        return f"Aida (K={match[1]})"
    first, _, rest = method.partition("+")
    if rest:
        return f"{title(first)} + {title(rest)}"
    if ":" in method:
        module, _, name = method.partition(":")
        return f"{name} ({module})"
    return catalog()[method].title if method in catalog() else method


def file_name(text: str) -> str:
    """``text`` as part of a file name, a link or a LaTeX label, on any system; different texts stay different."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:100].strip(".-")
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}".lstrip("-")


def ordered(methods: Iterable[str]) -> list[str]:
    """Aida first, then the catalog's order, then optimizers from outside."""
    names = list(catalog())

    def place(method: str) -> tuple[int, list[tuple[bool, float, str]]]:
        base = method.partition(" ")[0]
        if match := re.fullmatch(r"aida-k(\d+)", base):
            return -int(match[1]), by_value(method)
        return (1 + names.index(base) if base in names else 1 + len(names)), by_value(method)

    return sorted(set(methods), key=place)


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A colour and a dash for each method; unknown methods get the unused pairs, in their order."""
    taken = set(_KNOWN.values())
    pairs = [(colour, dash) for dash in range(len(DASHES)) for colour in range(len(MARKERS))]
    free = [pair for pair in pairs if pair not in taken]
    unknown = cycle(free)
    return {method: Look(*(_KNOWN.get(method) or next(unknown))) for method in ordered(methods)}
