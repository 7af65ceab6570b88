"""The table of rooms in docs/architecture.md, checked against the imports of both packages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "src").rglob("*.py"))
Rooms = dict[str, tuple[set[str], set[str]]]


def declared() -> Rooms:
    """Each room of the table with the rooms that it may import anywhere, and only inside functions."""
    rooms: Rooms = {}
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        cells = [set(re.findall(r"`(aida[\w.]*)`", cell)) for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[0]:
            rooms |= dict.fromkeys(cells[0], (cells[1], cells[2]))
    return rooms


ROOMS = declared()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    """The room that a module is in: the longest declared name that it begins with. A package alone is a room too."""
    if module in ("aida", "aida_lab"):
        return module
    inside = [room for room in ROOMS if module == room or (module.startswith(f"{room}.") and "." in room)]
    return max(inside, key=len, default=None)


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules of ours that a file imports, each with whether it does so at the top level."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    modules = {module_of(file) for file in FILES}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in inner]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [(name, id(node) in top) for name in names if name.split(".")[0] in ("aida", "aida_lab")]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_imports_go_in_one_direction(path: Path) -> None:
    room = room_of(module_of(path))
    assert room in ROOMS, f"{module_of(path)} is in no room: add it to the table of docs/architecture.md"
    anywhere, inside_functions = ROOMS[room]
    for module, at_top in imports(path):
        other = room_of(module)
        if other == room:
            continue
        allowed = anywhere if at_top else anywhere | inside_functions
        assert other in allowed, f"{path.name} imports {module}, which {room} may not import there"


def test_rooms_form_no_circle_of_imports_at_the_top() -> None:
    done: set[str] = set()
    while ready := {room for room, (above, _) in ROOMS.items() if room not in done and above <= done | {room}}:
        done |= ready
    assert done == set(ROOMS), f"these rooms import one another in a circle: {sorted(set(ROOMS) - done)}"


def test_every_room_of_the_table_exists() -> None:
    modules = {module_of(path) for path in FILES}
    assert [room for room in ROOMS if room not in modules] == []


def test_the_optimizer_knows_no_experiment() -> None:
    # in quotes "digits" is the experiment; bare, the digits of a number
    names = re.compile(r"cifar|lstm|multi30k|wgan|imagenet|[\"'`]digits|aida_lab", re.IGNORECASE)
    sources = [path for path in (ROOT / "src" / "aida").rglob("*") if path.suffix in (".py", ".c", ".h")]
    found = [(path.name, names.findall(text)) for path in sources if names.search(text := path.read_text())]
    assert not found, "values and names of experiments belong into aida_lab/experiments"


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_no_file_holds_two_ideas(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
