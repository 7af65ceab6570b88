"""Translation with a transformer: label smoothing, a loss summed over words, teacher-forced accuracy.

All sentences are on the device as two padded grids. A batch of pairs is packed into rows of :data:`WIDTH` tokens; it
consists of two tables of indices into the grids. Without packing more than half of a batch would be padding: a sentence
of Multi30k has 14 words on average and at most 48. With :data:`ROOM` rows per pair nearly every batch of 200 has the
same shape, so that a GPU can train from one CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from aida_lab import distributed
from aida_lab.data.translation import PAD, Pairs
from aida_lab.models.transformer import Segments, Transformer
from aida_lab.sharding import my_rows, whole_dropout
from aida_lab.task import Task, TaskContext, backward_and_step, perplexity

#: Target probability of all wrong words together.
SMOOTHING = 0.1

#: Minimum number of tokens in a row: good for tensor cores, and a third more than the longest sentence of Multi30k.
WIDTH = 64
#: Rows per pair: a batch of 200 gets 52, and Multi30k needs 47.2 ± 1.0.
ROOM = 0.26
#: A batch that needs more rows gets a multiple of this.
BLOCK = 8

#: Batch size of the evaluation: about 7,300 words, whose logits are 280 MB in float32.
AT_ONCE = 512


def room(pairs: int, needed: int) -> int:
    """Number of rows for a batch of ``pairs`` that needs at least ``needed`` rows."""
    usual = math.ceil(ROOM * pairs)
    return usual if needed <= usual else -(-needed // BLOCK) * BLOCK


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with :data:`SMOOTHING` spread over all *other* words, summed over all tokens except padding.

    torch spreads label_smoothing s over all V words, including the right one. s = SMOOTHING · V / (V − 1) gives each
    wrong word SMOOTHING / (V − 1) and the right one 1 − SMOOTHING.
    """
    vocabulary = logits.size(-1)
    share = SMOOTHING * vocabulary / (vocabulary - 1)
    return functional.cross_entropy(logits.float(), labels, ignore_index=PAD, label_smoothing=share, reduction="sum")


class Place(NamedTuple):
    """The start of a pair: its row, and its first column in the source and in the target."""

    row: int
    source: int
    target: int


def first_fit(lengths: Sequence[tuple[int, int]], width: int) -> list[Place]:
    """A place for every pair of (source, target) lengths, in rows of ``width`` tokens per side.

    First-fit decreasing: longest pairs first, each into the first row with space for both sides. 200 pairs of Multi30k
    need two rows of 64 more than the minimum. The host takes a millisecond, while a GPU is busy with earlier steps.
    """
    places = [Place(0, 0, 0)] * len(lengths)
    left: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: (max(lengths[each]), sum(lengths[each])), reverse=True):
        source, target = lengths[index]
        row = next((row for row, (a, b) in enumerate(left) if source <= a and target <= b), len(left))
        if row == len(left):
            left.append((width, width))
        a, b = left[row]
        places[index] = Place(row, width - a, width - b)
        left[row] = a - source, b - target
    return places


class Corpus:
    """Sentence pairs as two grids on a device, each with a last row of padding."""

    def __init__(self, pairs: Pairs, device: torch.device) -> None:
        self.source, self.target = (
            functional.pad(side.padded(), (0, 0, 0, 1), value=PAD).to(device) for side in (pairs.source, pairs.target)
        )
        # the decoder does not read the last token of a target, which is only predicted
        self.lengths = torch.stack([pairs.source.lengths, pairs.target.lengths - 1], dim=1)
        longest = max(self.source.size(1), self.target.size(1))
        self._width = max(WIDTH, -(-longest // 8) * 8)

    def __len__(self) -> int:
        return len(self.lengths)

    def pack(self, numbers: Tensor) -> Tensor:
        """Pack the pairs with these numbers: indices into the two grids, ``(2, rows, WIDTH)``, on the host."""
        lengths = self.lengths[numbers]
        places = torch.tensor(first_fit(lengths.tolist(), self._width)).view(-1, 3)
        rows = room(len(numbers), int(places[:, 0].max()) + 1)
        sides = []
        for side, grid in enumerate((self.source, self.target)):
            length = lengths[:, side]
            # for every token, one after the other: its position in its sentence, where it goes, and where it comes from
            within = torch.arange(int(length.sum())) - (length.cumsum(0) - length).repeat_interleave(length)
            starts = places[:, 0] * self._width + places[:, 1 + side]
            found = torch.full((rows * self._width,), (len(grid) - 1) * grid.size(1))  # elsewhere the row of padding
            found[starts.repeat_interleave(length) + within] = numbers.repeat_interleave(length) * grid.size(1) + within
            sides.append(found.view(rows, self._width))
        return torch.stack(sides)


class TranslationTask(Task):
    """Trains a transformer on sentence pairs."""

    def __init__(self, context: TaskContext, model: Transformer, train: Pairs, valid: Pairs) -> None:
        super().__init__(context, model=model)
        self.model = model
        self._train, self._valid = Corpus(train, context.device), Corpus(valid, context.device)
        count = self._limited(len(valid))
        self._valid_words = int(self._valid.lengths[:count, 1].sum())
        packed = [self._valid.pack(some).to(self._device) for some in torch.arange(count).split(AT_ONCE)]
        self._valid_batches = [my_rows(some, dim=1) for some in packed]
        self._batches: tuple[Tensor, ...] = ()
        self._packed: tuple[int, Tensor] | None = None
        self._loss = self._compiled(self._summed_loss)

    def begin_epoch(self, epoch: int) -> int:
        self._batches = self._shuffled(len(self._train), epoch).split(self._spec.batch)[: self._spec.limit]
        self._packed = None
        return len(self._batches)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        packed = my_rows(self._pack(index), dim=1)
        if self._device.type == "cuda":  # without synchronizing: the device is still busy with an earlier step
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        return packed.unbind()

    def kind(self, index: int) -> str:
        """The number of rows in all processes."""
        return str(self._pack(index).size(1))

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        source, target = batch
        optimizer = optimizers["model"]
        optimizer.zero_grad(set_to_none=True)
        with whole_dropout(int(kind)):
            summed, words = self._loss(source, target)
        # the optimizer gets the mean of the gradients over processes
        loss = backward_and_step(optimizer, summed * distributed.world()) / distributed.world()
        return distributed.total(loss) / distributed.total(words)

    @torch.no_grad()
    def evaluate(self, final: bool) -> Mapping[str, float]:
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for source, target in self._valid_batches:
            logits, labels = self._predict(self._valid, source, target)
            loss = functional.cross_entropy(logits.float(), labels, ignore_index=PAD, reduction="sum")
            right = ((logits.argmax(-1) == labels) & (labels != PAD)).sum()
            sums += torch.stack([loss.double(), right.double()])
        self.model.train()
        loss_sum, right_sum = distributed.total(sums).tolist()
        return {
            "accuracy": 100 * right_sum / self._valid_words,
            "valid_ppl": perplexity(loss_sum / self._valid_words),
        }

    def _pack(self, index: int) -> Tensor:
        """Batch ``index``, packed on first use, while a GPU is busy with earlier batches."""
        if self._packed is None or self._packed[0] != index:
            self._packed = index, self._train.pack(self._batches[index])
        return self._packed[1]

    def _predict(self, corpus: Corpus, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and labels of every place; ``source`` and ``target`` are indices into the two grids."""
        with self._context.autocast():
            (words, segments), (read, read_segments) = _read(corpus.source, source), _read(corpus.target, target)
            logits = self.model(words, read, (segments, read_segments))
        return logits.flatten(0, 1), corpus.target.flatten()[target + 1].flatten()

    def _summed_loss(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss and the number of words."""
        logits, labels = self._predict(self._train, source, target)
        return smoothed_loss(logits, labels), (labels != PAD).sum()


def _read(grid: Tensor, where: Tensor) -> tuple[Tensor, Segments]:
    """The tokens at these indices into a grid whose rows are sentences."""
    return grid.flatten()[where], Segments(where // grid.size(1), where % grid.size(1))
