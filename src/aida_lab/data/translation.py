"""Multi30k as pairs of tokenised sentences.

spaCy tokenises the sentences once. The result is cached beside the raw files in ``tokens.pt``, so that a machine
without spaCy can train from it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aida_lab.data import local, sets
from aida_lab.data.cache import cached
from aida_lab.data.local import DataError, Root

UNKNOWN, PAD, BEGIN, END = 0, 1, 2, 3
SPECIAL = ("<unk>", "<blank>", "<s>", "</s>")

MIN_COUNT = 3  #: words that are rarer in the training sentences of a language are unknown
MAX_TOKENS = 100  #: training pairs with a longer sentence are dropped

#: Split name -> file name.
SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}

CACHE = "tokens.pt"
_FORMAT = 1

Tokenizer = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Sentences:
    """Concatenated sentences, each from ``<s>`` to ``</s>``; sentence i is numbers[starts[i]:starts[i + 1]]."""

    numbers: Tensor  #: int32
    starts: Tensor  #: int64, one more entry than sentences

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.numbers[int(self.starts[index]) : int(self.starts[index + 1])]

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    def padded(self) -> Tensor:
        """All sentences as rows (sentences, longest), int64, padded with :data:`PAD`."""
        lengths = self.lengths
        rows = torch.full((len(self), int(lengths.max())), PAD, dtype=torch.int64)
        rows[torch.arange(rows.shape[1]) < lengths.unsqueeze(1)] = self.numbers.long()
        return rows


@dataclass(frozen=True)
class Pairs:
    """German sentences and their English translations, in the same order."""

    source: Sentences
    target: Sentences

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class Translation:
    train: Pairs
    valid: Pairs
    test: Pairs
    words: tuple[str, ...]  #: of both languages; ``words[number]`` is the word


def multi30k(root: Root = None) -> Translation:
    """German to English, 29,000 / 1,014 / 1,000 pairs, 9,521 words. Uses the cache if it is valid."""
    texts = {
        f"{split}.{language}": bytes(local.read(sets.MULTI30K, f"{file}.{language}", root))
        for split, file in SPLITS.items()
        for language in ("de", "en")
    }

    def tokenised() -> dict[str, Any]:
        lines = {name: text.decode("utf-8").split("\n") for name, text in texts.items()}
        # the files end in a newline, and splitlines() would split at separators inside some sentences
        lines = {name: rows[:-1] if rows[-1] == "" else rows for name, rows in lines.items()}
        found = number_pairs(lines, _spacy("de"), _spacy("en"))
        content: dict[str, Any] = {"words": list(found.words)}
        for split in SPLITS:
            pairs: Pairs = getattr(found, split)
            for language, side in (("de", pairs.source), ("en", pairs.target)):
                content[f"{split}.{language}"] = (side.numbers, side.starts)
        return content

    origin = hashlib.sha256(b"\0".join(texts.values())).hexdigest()
    path = local.require(sets.MULTI30K, root) / CACHE
    stored = cached(path, _FORMAT, origin, "the tokens", tokenised)
    pairs = {
        split: Pairs(*(Sentences(*stored[f"{split}.{language}"]) for language in ("de", "en"))) for split in SPLITS
    }
    return Translation(**pairs, words=tuple(stored["words"]))


def number_pairs(lines: Mapping[str, Sequence[str]], german: Tokenizer, english: Tokenizer) -> Translation:
    """Number the words of ``lines["train.de"]``, ``lines["train.en"]`` and so on with one shared vocabulary."""
    pairs = {}
    for split in SPLITS:
        cut = [
            ([word.lower() for word in german(de)], [word.lower() for word in english(en)])
            for de, en in zip(lines[f"{split}.de"], lines[f"{split}.en"], strict=True)
        ]
        keep_all = split != "train"
        pairs[split] = [pair for pair in cut if keep_all or max(map(len, pair)) <= MAX_TOKENS]
    german_words = vocabulary(pair[0] for pair in pairs["train"])
    english_words = vocabulary(pair[1] for pair in pairs["train"])
    # German words first, then the English words that are not in the German vocabulary
    numbers = {word: number for number, word in enumerate(dict.fromkeys((*german_words, *english_words)))}
    numbered = {
        split: Pairs(*(_numbered([pair[side] for pair in rows], numbers) for side in (0, 1)))
        for split, rows in pairs.items()
    }
    return Translation(**numbered, words=tuple(numbers))


def vocabulary(sentences: Any) -> tuple[str, ...]:
    """The special words, then the frequent words by falling count, ties in alphabetical order."""
    counts = Counter(word for sentence in sentences for word in sentence)
    kept = sorted((word for word in counts if counts[word] >= MIN_COUNT), key=lambda word: (-counts[word], word))
    return (*SPECIAL, *(word for word in kept if word not in SPECIAL))


def _numbered(sentences: Sequence[Sequence[str]], numbers: Mapping[str, int]) -> Sentences:
    rows = [[BEGIN, *(numbers.get(word, UNKNOWN) for word in sentence), END] for sentence in sentences]
    starts = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return Sentences(torch.tensor([number for row in rows for number in row], dtype=torch.int32), starts)


def _spacy(language: str) -> Tokenizer:
    try:
        import spacy
    except ImportError:
        raise DataError(
            "Multi30k must be tokenised once with spaCy, which is not installed: pip install '.[data]' in a clone; or "
            f"copy {CACHE} from the multi30k folder of another machine"
        ) from None
    tokenizer = spacy.blank(language).tokenizer
    return lambda line: [token.text for token in tokenizer(line)]
