"""The notebooks run from top to bottom, and the outputs stored in them are what they print, up to the digits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn", reason="the notebooks learn scikit-learn's digits")
matplotlib = pytest.importorskip("matplotlib", reason="the notebooks draw")

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs/notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def stored(cell: dict[str, Any], kind: str) -> str:
    outputs = [output.get("data", {}).get(kind) or output.get(kind, "") for output in cell["outputs"]]
    return "".join("".join(output) for output in outputs)


def without_digits(text: str) -> list[str]:
    return [" ".join(re.sub(r"[\d.]+(?:e[-+]?\d+)?", "#", line).split()) for line in text.splitlines()]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored_in_it(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    for cell in code_cells(notebook):
        source = re.sub(r"^%.*", "", "".join(cell["source"]), flags=re.MULTILINE)
        exec(compile(source.replace("plt.show()", "plt.close()"), notebook.name, "exec"), names)
        printed = capsys.readouterr().out
        shown = stored(cell, "text")
        if "explain(" in source:  # its last line depends on the machine
            printed, shown = (text.rpartition("  path")[0] for text in (printed, shown))
        assert without_digits(printed) == without_digits(shown)
        assert bool(stored(cell, "image/png")) == bool(re.search(r"plt\.show\(\)|^draw\(", source, flags=re.MULTILINE))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_pictures_of_a_notebook_are_small(notebook: Path) -> None:
    pictures = [stored(cell, "image/png") for cell in code_cells(notebook)]
    assert 0 < max(map(len, pictures)) * 3 / 4 < 100_000
