"""The mean loss of a recurrent language model over a text, computed on many chunks in parallel.

An LSTM reads words one after the other, and on a GPU each word is a kernel or two: the 82,430 words of Penn Treebank's
test set in one column took nearly as long as an epoch of training. So each column is split into chunks that are read in
parallel, in rounds. In each round a chunk starts from the final state of the chunk before it in the last round. After
round n the first n chunks are exact, so as many rounds as chunks give the sequential result. Usually fewer are enough:
as soon as no initial state changes any more, all chunks are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aida_lab.models.lstm import AwdLstm, LayerState

#: Minimum number of words in a chunk: far more than a model remembers, so two rounds are mostly enough.
CHUNK = 1024

#: Tolerance on the change of an initial state, per element. Such a change affects only the first words of a chunk.
TOLERANCE = 1e-5

#: Number of words per block of logits: at most 330 MB in float32.
AT_ONCE = 8192


def mean_loss(model: AwdLstm, columns: Tensor) -> Tensor:
    """Mean cross entropy in float64 over columns of ``(length, batch)`` words, except the first word of each.

    The model must be in eval mode.
    """
    length, batch = columns.shape
    chunks = max(1, (length - 1) // CHUNK)
    cut = (length - 1) // chunks * chunks
    words = _in_chunks(columns[:cut], chunks)
    starts = model.initial_state(chunks * batch)
    for _ in range(chunks):
        hidden, ends = model.read(words, starts)
        before, starts = starts, [(_next_starts(h, batch), _next_starts(c, batch)) for h, c in ends]
        if not _largest_difference(starts, before) > TOLERANCE:  # also stops at NaN
            break
    total = _sum_of_losses(model, hidden, _in_chunks(columns[1 : cut + 1], chunks))
    if cut < length - 1:
        last = [(h[:, -batch:].contiguous(), c[:, -batch:].contiguous()) for h, c in ends]
        total += _sum_of_losses(model, model.read(columns[cut:-1], last)[0], columns[cut + 1 :])
    return total / ((length - 1) * batch)


def _sum_of_losses(model: AwdLstm, hidden: Tensor, following: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for some, wanted in zip(hidden.flatten(0, 1).split(AT_ONCE), following.flatten().split(AT_ONCE), strict=True):
        total += functional.cross_entropy(model.logits(some).float(), wanted, reduction="sum")
    return total


def _in_chunks(columns: Tensor, chunks: int) -> Tensor:
    """``(length, batch)`` to ``(length / chunks, chunks * batch)``: all first chunks, then all second chunks, ..."""
    return columns.reshape(chunks, -1, columns.size(1)).transpose(0, 1).flatten(1)


def _next_starts(ends: Tensor, batch: int) -> Tensor:
    """The initial states: the final state of the chunk before; zero for the first chunk."""
    return torch.cat([torch.zeros_like(ends[:, :batch]), ends[:, :-batch]], dim=1)


def _largest_difference(some: list[LayerState], others: list[LayerState]) -> float:
    pairs = [(a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True)]
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()
