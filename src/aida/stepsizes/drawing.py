"""The style of all figures, and how they are saved: as PNG and SVG."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's palette, safe for the common colour-vision deficiencies.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

#: For bounds, grids and remarks.
GREY = "#5F6368"

#: The fixed salt, and a file without a date, make files of the same data identical.
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
    """An empty figure that is not registered with pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def styled() -> Any:
    """A context manager that applies the style and restores the user's settings."""
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "drawing a figure needs matplotlib: pip install aida-optim[lab]", name="matplotlib"
        ) from None
    return rc_context(_STYLE)


def literal(text: str) -> str:
    """``text`` with dollar signs escaped, which would otherwise start a formula."""
    return text.replace("$", r"\$")


def save(figure: Figure, stem: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``stem.png`` and ``stem.svg`` atomically. Missing folders are created."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    with styled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # missing glyphs, labels that do not fit
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
