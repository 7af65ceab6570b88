"""Where words stand: sentences side by side in rows of equal length, which attention keeps apart.

Batches of random sentences are more than half padding (Multi30k: 14 words of 48 at most on average). Several
sentences in a row leave little of it, in shapes that a CUDA graph can keep. Only attention has to know which
words belong together; everything else acts on single words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """What stands at each place of ``(rows, width)``."""

    sentences: Tensor  #: a number of the sentence; padding has one that no sentence of its row has
    positions: Tensor  #: how far from the start of its sentence

    def sees(self, other: Layout, *, causal: bool = False) -> Tensor:
        """``(rows, width, other width)``: true where a word may attend to one of ``other``.

        That is a word of the same sentence in the same row; where ``causal``, none that comes later.
        """
        seen = self.sentences[:, :, None] == other.sentences[:, None, :]
        return seen & (self.positions[:, :, None] >= other.positions[:, None, :]) if causal else seen


def whole(words: Tensor) -> Layout:
    """A sentence a row, true where a word stands."""
    return Layout(words.int(), torch.arange(words.size(1), device=words.device).expand(words.shape))
