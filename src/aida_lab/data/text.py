"""Penn Treebank as one long sequence of word ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from aida_lab.data import local, sets

END_OF_LINE = "<eos>"


@dataclass(frozen=True)
class LanguageSplits:
    """Word ids (int64) per split; ``words[id]`` is the word."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: tuple[str, ...]


def ptb(root: local.Root = None) -> LanguageSplits:
    """Mikolov's Penn Treebank: 929,589 / 73,760 / 82,430 tokens, 10,000 words."""
    names = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
    return number_words(*(local.read(sets.PTB, name, root).decode("utf-8").splitlines() for name in names))


def number_words(train: Iterable[str], valid: Iterable[str], test: Iterable[str]) -> LanguageSplits:
    """Number the words in order of appearance in the three texts. Each line ends in ``<eos>``."""
    numbers: dict[str, int] = {}
    texts = [
        [numbers.setdefault(word, len(numbers)) for line in lines for word in (*line.split(), END_OF_LINE)]
        for lines in (train, valid, test)
    ]
    first, second, third = (torch.tensor(ids, dtype=torch.int64) for ids in texts)
    return LanguageSplits(first, second, third, tuple(numbers))


def batchify(tokens: Tensor, batch: int) -> Tensor:
    """Split the sequence into ``batch`` columns of equal length, (length, batch). The remainder is dropped."""
    length = tokens.numel() // batch
    if batch < 1 or length < 1:
        raise ValueError(f"batch={batch} must be between 1 and the number of tokens, {tokens.numel()}")
    return tokens[: length * batch].view(batch, length).t().contiguous()
