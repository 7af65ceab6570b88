"""The table "who may know whom" of docs/architecture.md, read off the imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "aida"

#: A room and the rooms it may import. A room is a module or a package of ours.
MAY_IMPORT: dict[str, set[str]] = {
    "rule": set(),
    "group_rules": set(),
    "checkpoint": set(),
    "settings": set(),
    "tracing": set(),
    "version": set(),
    "drawing": set(),
    "misspelt": set(),
    "hyper": {"group_rules"},
    "readings": {"rule"},
    "backends": {"rule", "hyper", "group_rules"},
    "batch_cache": {"backends", "hyper", "group_rules"},
    "refusals": {"group_rules"},
    "state": {"checkpoint", "group_rules"},
    "optimizer": {"rule", "group_rules", "tracing", "hyper", "backends", "batch_cache", "refusals", "state"},
    "baselines": {"catalog", "readings", "settings", "checkpoint", "group_rules", "refusals"},
    "catalog": {"optimizer", "readings", "settings", "baselines", "misspelt"},
    "stepsizes": {"catalog", "optimizer", "readings", "rule", "hyper", "backends", "drawing"},
    "theory": {"rule", "drawing"},
    "lab": {"catalog", "stepsizes", "version", "baselines", "misspelt"},
    "report": {"catalog", "stepsizes", "lab", "drawing", "version"},
    "cli": {"catalog", "stepsizes", "theory", "lab", "drawing", "version", "report"},
    "__init__": {"optimizer", "stepsizes", "version"},
    "__main__": {"cli"},
}

#: What a room imports only when it is used: at the top of a file these would be a circle, or slow.
LAZY = {("catalog", "baselines"), ("cli", "*"), ("__init__", "stepsizes")}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """Rooms that a file imports, each with whether it does so at the top level."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "aida":
            parts = node.module.split(".")[1:]
            rooms = [parts[0]] if parts else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            rooms = [name.split(".")[1] for name in (alias.name for alias in node.names) if name.startswith("aida.")]
        else:
            continue
        found += [(room, id(node) in top) for room in rooms]
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_in_one_direction(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} is a new room: say in docs/architecture.md and here whom it may know"
    for other, at_top in imports(path):
        if other == room:
            continue
        assert other in MAY_IMPORT[room], f"{path.name} imports {other}, which {room} may not know"
        lazy = (room, other) in LAZY or (room, "*") in LAZY
        assert not (lazy and at_top), (
            f"{path.name} imports {other} at the top; it must be inside the function that uses it"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_holds_two_ideas(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
