"""The style of every figure of the package, and saving one as PNG and SVG."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's palette, which readers with the common colour-vision deficiencies can distinguish, darkened to a
#: contrast of 3 on white, with wine, olive and indigo added.
COLOURS = (
    "#0072B2", "#D55E00", "#008F68", "#C0629A", "#C98500", "#3A9BD9", "#1B1F24", "#882255", "#7A7A1F", "#5B4FB3",
)  # fmt: skip
#: The same colours on a dark page.
DARK_COLOURS = (
    "#5AA9E6", "#FF8C42", "#2FCA99", "#EE9FC9", "#F0C23C", "#A5DCFF", "#E9ECEF", "#E0729F", "#C3C35A", "#A79BFF",
)  # fmt: skip

#: For bounds, grids and remarks.
GREY = "#5F6368"

#: The salt and the missing date make the files of the same data the same bytes.
_STYLE: Any = {
    "svg.hashsalt": "aida",
    "svg.fonttype": "none",  # text as text: smaller files, and letters that stay sharp
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
    """An empty figure in the package's style, without a window or global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def styled() -> Any:
    """A context manager that applies the style and restores the caller's settings."""
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "drawing a figure needs matplotlib: pip install '.[lab]' in a clone", name="matplotlib"
        ) from None
    return rc_context(_STYLE)


def literal(text: str) -> str:
    """``text`` with dollar signs escaped: matplotlib would typeset what is between two of them as a formula."""
    return text.replace("$", r"\$")


def save(figure: Figure, stem: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``stem.png`` and ``stem.svg`` atomically; the folder is made if missing. The SVG is transparent."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    with styled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a missing glyph, a label without room
        _write(figure, png, dpi=160, metadata={"Software": None})
        _write(figure, svg, metadata={"Date": None}, transparent=True)
    return png, svg


def _write(figure: Figure, path: Path, **options: Any) -> None:
    side = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    side.unlink(missing_ok=True)
    try:
        figure.savefig(side, format=path.suffix[1:], **options)
        os.replace(side, path)
    finally:
        side.unlink(missing_ok=True)
