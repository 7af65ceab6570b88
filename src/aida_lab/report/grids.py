"""A table as values: what each field shows, how it sorts, whether it is bold and which runs are behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Field:
    text: str
    #: The sort key; None sorts by the text.
    order: float | None = None
    bold: bool = False
    #: The configuration whose specs and runs it opens.
    opens: str = ""
    #: Another field of the row opens the same, so this one is not underlined.
    quiet: bool = False
    #: Small print below the text.
    note: str = ""
    #: Says why there is no value.
    faint: bool = False

    @property
    def plain(self) -> str:
        """Text and small print in one line."""
        return f"{self.text} ({self.note})" if self.note else self.text


@dataclass(frozen=True)
class Head:
    text: str
    #: Explains the column.
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Grid:
    """One table: a name for files and links, a title, rows, and remarks below it."""

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


def without_empty(built: Grid) -> Grid:
    """The table without columns in which no row has a value. The first two always stay."""
    kept = [place for place in range(len(built.heads)) if place < 2 or any(_filled(row[place]) for row in built.rows)]
    return replace(
        built,
        heads=tuple(built.heads[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in built.rows),
    )


def _filled(field: Field) -> bool:
    return bool(field.text) and not field.faint
