"""What the tests of the lab's networks share: random words, a tiny transformer, the losses of the text tasks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aida_lab.models.lstm import AwdLstm
from aida_lab.models.transformer import Transformer

#: Multi30k's padding word.
PAD = 1


def one_thread_and_a_seed() -> None:
    """To be made a fixture: results that repeat, on one of the cores that test workers share."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def words(*shape: int, vocabulary: int) -> Tensor:
    """Random words, none of them unknown, padding, or the start or end of a sentence."""
    return torch.randint(4, vocabulary, shape)


def language_loss(model: AwdLstm, text: Tensor) -> Tensor:
    """Penn Treebank's: cross entropy of the next word and the two penalties on the last layer."""
    out = model(text[:-1], model.initial_state(text.size(1)))
    penalty = 2 * out.dropped.pow(2).mean() + (out.raw[1:] - out.raw[:-1]).pow(2).mean()
    return functional.cross_entropy(out.logits.flatten(0, 1), text[1:].flatten()) + penalty


def translation_loss(model: Transformer, source: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every target word given those before it, over what is not padding."""
    logits = model(source, target[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)


def tiny_transformer(dropout: float = 0.0) -> Transformer:
    return Transformer(50, pad=PAD, d_model=32, d_inner=64, layers=2, heads=4, dropout=dropout)
