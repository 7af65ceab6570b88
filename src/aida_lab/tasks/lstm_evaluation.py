"""The mean loss of a language model over a text, read in many places at once.

A recurrent model reads word after word, and on a GPU each word is a kernel or two that wait for the one before: in one
column the 82,430 words of Penn Treebank's test set took nearly as long as an epoch of training. So each column is cut
into pieces, and all are read side by side, each from the state in which the piece before it ended the last time
round. The first piece is right in the first round, the second in the second, and so on: as many rounds as there are
pieces give what one reading from the start gives, whatever the model remembers. But it forgets: as soon as no start
moves any more, all are right.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aida_lab.models.lstm import AwdLstm, LayerState

#: Words in a piece, at least: well beyond what a model remembers, so that the second round is mostly the last.
PIECE = 1024

#: How far a start may still move, in any hidden or cell value: it touches but the first words of a piece.
SETTLED = 1e-5

#: Words whose logits are made at once: at most 330 MB in float32.
AT_ONCE = 8192


def mean_loss(model: AwdLstm, columns: Tensor) -> Tensor:
    """Mean cross entropy in float64 of every word but the first of each column of ``(length, batch)`` words.

    The model is one that evaluates, without dropout.
    """
    length, batch = columns.shape
    pieces = max(1, (length - 1) // PIECE)
    cut = (length - 1) // pieces * pieces
    words = _side_by_side(columns[:cut], pieces)
    starts = model.initial_state(pieces * batch)
    for _ in range(pieces):
        hidden, ends = model.read(words, starts)
        before, starts = starts, [(_moved_on(h, batch), _moved_on(c, batch)) for h, c in ends]
        if not _largest_difference(starts, before) > SETTLED:  # also where a value is no number any more
            break
    total = _sum_of_losses(model, hidden, _side_by_side(columns[1 : cut + 1], pieces))
    if cut < length - 1:
        last = [(h[:, -batch:].contiguous(), c[:, -batch:].contiguous()) for h, c in ends]
        total += _sum_of_losses(model, model.read(columns[cut:-1], last)[0], columns[cut + 1 :])
    return total / ((length - 1) * batch)


def _sum_of_losses(model: AwdLstm, hidden: Tensor, following: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for some, wanted in zip(hidden.flatten(0, 1).split(AT_ONCE), following.flatten().split(AT_ONCE), strict=True):
        total += functional.cross_entropy(model.guess(some).float(), wanted, reduction="sum")
    return total


def _side_by_side(columns: Tensor, pieces: int) -> Tensor:
    """``(length, batch)`` as ``(length / pieces, pieces * batch)``: all first pieces, then all second ones, ..."""
    return columns.reshape(pieces, -1, columns.size(1)).transpose(0, 1).flatten(1)


def _moved_on(ends: Tensor, batch: int) -> Tensor:
    """Where each piece starts: where the one before it ended, and the first one at zero."""
    return torch.cat([torch.zeros_like(ends[:, :batch]), ends[:, :-batch]], dim=1)


def _largest_difference(some: list[LayerState], others: list[LayerState]) -> float:
    pairs = [(a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True)]
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()
