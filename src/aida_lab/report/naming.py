"""What a method is called and how it looks, the same in every table, figure and on the page."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from aida.catalog import catalog

#: Families share a colour and differ in the dash. Indices of :data:`aida.stepsizes.drawing.COLOURS`.
_KNOWN = {
    "aida-k2": (1, 0),
    "aida-k1": (1, 1),
    "adabelief": (0, 0),
    "adabelief-star": (0, 1),
    "adam": (2, 0),
    "adamw": (2, 1),
    "adam-plus": (2, 2),
    "radam": (5, 0),
    "sgd": (6, 0),
    "fromage": (6, 1),
    "yogi": (3, 0),
    "msvag": (3, 1),
    "adabound": (4, 0),
}

#: Line styles as lengths of strokes and gaps, in widths of the line; a marker goes with each colour.
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.6), (1, 1.4), (6, 1.4, 1, 1.4))
MARKERS = ("o", "D", "s", "^", "v", "P", "X")


@dataclass(frozen=True)
class Look:
    colour: int
    dash: int


def title(method: str) -> str:
    """``Aida (K=2)`` for ``aida-k2``, the catalog's title for a name of the catalog, the class for one from outside."""
    if match := re.fullmatch(r"aida-k(\d+)", method):
        return f"Aida (K={match[1]})"
    if ":" in method:
        module, _, name = method.partition(":")
        return f"{name} ({module})"
    return catalog()[method].title if method in catalog() else method


def file_name(text: str) -> str:
    """``text`` as part of a file name, a link or a label of LaTeX, on any system; different texts stay different."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:100].strip(".-")
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}".lstrip("-")


def ordered(methods: Iterable[str]) -> list[str]:
    """Aida first, then the catalog's order, then those from outside."""
    names = list(catalog())

    def place(method: str) -> tuple[int, str]:
        if match := re.fullmatch(r"aida-k(\d+)", method):
            return -int(match[1]), method
        return (1 + names.index(method) if method in names else 1 + len(names)), method

    return sorted(set(methods), key=place)


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A colour and a dash for each method; those that are not known get what is left, in their order."""
    found: dict[str, Look] = {}
    taken = set(_KNOWN.values())
    free = [
        (colour, dash) for dash in range(len(DASHES)) for colour in range(len(MARKERS)) if (colour, dash) not in taken
    ]
    strangers = 0
    for method in ordered(methods):
        if method in _KNOWN:
            found[method] = Look(*_KNOWN[method])
        else:
            found[method] = Look(*free[strangers % len(free)])
            strangers += 1
    return found
