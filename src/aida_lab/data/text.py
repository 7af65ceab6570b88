"""Penn Treebank as one long row of word numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from aida_lab.data import local, sets

END_OF_LINE = "<eos>"


@dataclass(frozen=True)
class LanguageSplits:
    """Word numbers, int64, of each split; ``words[number]`` is the word."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: tuple[str, ...]


def ptb(root: str | os.PathLike[str] | None = None) -> LanguageSplits:
    """Mikolov's Penn Treebank: 929,589 / 73,760 / 82,430 tokens, 10,000 words."""
    names = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
    return number_words(*(local.read(sets.PTB, name, root).decode("utf-8").splitlines() for name in names))


def number_words(train: Iterable[str], valid: Iterable[str], test: Iterable[str]) -> LanguageSplits:
    """Number the words in the order in which they appear in the three texts; a line ends in ``<eos>``."""
    numbers: dict[str, int] = {}
    rows = (
        torch.tensor(
            [numbers.setdefault(word, len(numbers)) for line in lines for word in (*line.split(), END_OF_LINE)],
            dtype=torch.int64,
        )
        for lines in (train, valid, test)
    )
    first, second, third = rows
    return LanguageSplits(first, second, third, tuple(numbers))


def batchify(tokens: Tensor, batch: int) -> Tensor:
    """Cut the row into ``batch`` columns of equal length, (length, batch); what is left over falls away."""
    length = tokens.numel() // batch
    if batch < 1 or length < 1:
        raise ValueError(f"batch={batch} must be between 1 and the {tokens.numel()} tokens there are")
    return tokens[: length * batch].view(batch, length).t().contiguous()
