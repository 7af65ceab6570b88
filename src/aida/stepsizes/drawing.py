"""How every figure of the package looks and is saved: one set of colours, PNG and SVG side by side."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's palette: told apart by readers with any of the common colour-vision deficiencies.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

#: What is not the subject of a figure: bounds, grids, remarks.
GREY = "#5F6368"

#: Without the salt and the missing date, drawing the same data twice would give two different files.
_STYLE: Any = {
    "svg.hashsalt": "aida",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.which": "major",
    "grid.color": "#E4E6E8",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in the package's style; it belongs to no window and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def styled() -> Any:
    """The style as a context: what is drawn within follows it, and the reader's own settings stay."""
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "drawing a figure needs matplotlib: pip install aida-optim[lab]", name="matplotlib"
        ) from None
    return rc_context(_STYLE)


def literal(text: str) -> str:
    """``text`` for a figure, letter by letter: a pair of dollar signs would make a formula of what is between them."""
    return text.replace("$", r"\$")


def save(figure: Figure, stem: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``stem.png`` and ``stem.svg``, each at once, making the folder where there is none."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    with styled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a font without a glyph, a name without room
        _write(figure, png, dpi=160, metadata={"Software": None})
        _write(figure, svg, metadata={"Date": None})
    return png, svg


def _write(figure: Figure, path: Path, **options: Any) -> None:
    side = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    side.unlink(missing_ok=True)
    try:
        figure.savefig(side, format=path.suffix[1:], **options)
        os.replace(side, path)
    finally:
        side.unlink(missing_ok=True)
