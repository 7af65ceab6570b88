"""Where the words of padded sentences stand: in a grid for attention, in one row for everything else.

Batches of random sentences are more than half padding (Multi30k: 14 words of 30 on average), and only
attention needs sentences as equal rows of a grid. All other maps act on single words, so they may run over
the words alone, in one row of a fixed capacity: shapes that a CUDA graph can keep, at half of the work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Rows and cells of the same words; :func:`whole` and :func:`packed` make them."""

    words: Tensor  #: ``(sentences, length)``, true where a word stands
    cells: Tensor | None = None  #: the cell of each row; None where the rows are all cells in order
    rows: Tensor | None = None  #: the row of each cell

    def row(self, grid: Tensor) -> Tensor:
        """``(sentences, length, ...)`` to ``(rows, ...)``."""
        flat = grid.flatten(0, 1)
        return flat if self.cells is None else _moved(flat, self.cells, self.rows)

    def grid(self, row: Tensor) -> Tensor:
        """``(rows, ...)`` to ``(sentences, length, ...)``."""
        flat = row if self.rows is None else _moved(row, self.rows, self.cells)
        grid: Tensor = flat.unflatten(0, self.words.shape)
        return grid

    def positions(self) -> Tensor:
        """How far from the start of its sentence each row stands."""
        sentences, length = self.words.shape
        if self.cells is not None:
            return self.cells % length
        return torch.arange(length, device=self.words.device).repeat(sentences)


def whole(words: Tensor) -> Layout:
    """Padding and all: a row for every cell."""
    return Layout(words)


def packed(words: Tensor, capacity: int) -> Layout:
    """The words alone, in ``capacity`` rows.

    There must be fewer words than ``capacity``, and the last cell must be padding. Then every row without
    a word stands in that cell, and every cell without a word in the last row: what is computed there never
    reaches a word, and its gradient is zero, so no mask has to hold the two apart. Neither is checked here:
    reading the number of words would stop the device.
    """
    counted = words.flatten().cumsum(0)
    wanted = torch.arange(1, capacity + 1, device=words.device)
    cells = torch.searchsorted(counted, wanted).clamp_(max=words.numel() - 1)
    rows = torch.where(words.flatten(), counted - 1, capacity - 1)
    return Layout(words, cells, rows)


class _Moved(torch.autograd.Function):
    """Gather in both directions; the backward of an ordinary gather adds with atomics: slow, in no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(there, back)
        return _gathered(x, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        there, back = ctx.saved_tensors
        return _moved(gradients[0], back, there), None, None


def _moved(x: Tensor, there: Tensor, back: Tensor | None) -> Tensor:
    moved: Tensor = _Moved.apply(x, there, back)  # type: ignore[no-untyped-call]
    return moved


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    # by eight bytes at a time: torch gathers an element a thread, and one of bfloat16 wastes most of it
    return x.contiguous().view(torch.int64).index_select(0, index).view(x.dtype)
