"""A table before it is written: rows of fields that know how to sort, what to stress and which runs they come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    text: str
    #: What it sorts by; by its text where None.
    order: float | None = None
    bold: bool = False
    #: The configuration whose specs and runs stand behind it.
    opens: str = ""
    #: It opens what another field of its row opens too, and need not draw attention to it.
    quiet: bool = False
    #: Small print below the text.
    note: str = ""
    #: Something missing rather than something measured.
    faint: bool = False

    @property
    def plain(self) -> str:
        """Text and small print in one line."""
        return f"{self.text} ({self.note})" if self.note else self.text


@dataclass(frozen=True)
class Head:
    text: str
    #: Explains the column where the word alone does not.
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Grid:
    """One table: a name for files and links, a title, what must be said below it."""

    name: str
    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Field, ...], ...]
    remarks: tuple[str, ...] = ()


def absent(text: str) -> Field:
    return Field(text, faint=True)


def grid(name: str, title: str, heads: Iterable[Head], rows: Iterable[Iterable[Field]], *remarks: str) -> Grid:
    built = Grid(name, title, tuple(heads), tuple(tuple(row) for row in rows), tuple(r for r in remarks if r))
    for row in built.rows:
        if len(row) != len(built.heads):
            raise ValueError(f"{name}: a row of {len(row)} fields under {len(built.heads)} heads")
    return built
