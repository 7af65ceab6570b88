"""Translation by a transformer: smoothed labels, a loss summed over words, teacher-forced accuracy.

Sentences lie on the device as two padded grids. A batch takes its rows from them; the network then leaves
the padding out (:mod:`aida.lab.models.layout`), for which the host only has to know how many words there
are. With room for :data:`ROOM` words a sentence nearly every batch of 200 has the same shapes, so that a
GPU trains from one graph: of Multi30k's batches one in ten million is fuller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from aida.lab.data.translation import PAD, Pairs, Sentences
from aida.lab.models.layout import packed
from aida.lab.models.transformer import Transformer
from aida.lab.task import Setting, stream
from aida.lab.tasks.descent import descend
from aida.lab.tasks.perplexity import perplexity

#: Share of the probability that training gives to all wrong words together.
SMOOTHING = 0.1

#: Words a sentence that a batch has room for: 3200 for 200, where 2890 ± 60 (German) and 2820 ± 60 (English) come.
ROOM = 16
#: A batch that needs more gets a multiple of this: the rows that one block of a matrix product takes.
BLOCK = 128

#: Sentences an evaluation reads at once; 7,300 words, whose logits are 280 MB in float32.
AT_ONCE = 512


def capacity(sentences: int, words: int) -> int:
    """Rows for that many words; at least one stays empty, as :func:`aida.lab.models.layout.packed` wants."""
    return max(ROOM * sentences, (words // BLOCK + 1) * BLOCK)


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with a share of :data:`SMOOTHING` over all *other* words, summed over what is not padding.

    torch spreads its share s over all V words, the right one included; s = SMOOTHING · V / (V − 1) gives
    each wrong word SMOOTHING / (V − 1) and leaves 1 − SMOOTHING with the right one.
    """
    vocabulary = logits.size(-1)
    share = SMOOTHING * vocabulary / (vocabulary - 1)
    return functional.cross_entropy(logits.float(), labels, ignore_index=PAD, label_smoothing=share, reduction="sum")


def grid(sentences: Sentences, beyond: int = 0) -> Tensor:
    """Rows of equal length, ``beyond`` more than a multiple of 8, all of which end in padding.

    Matrix products are several times as fast over multiples of 8. Of a target all words but the last are read and
    all but the first predicted, so its grid has one column more.
    """
    rows = sentences.padded()
    length = (rows.size(1) // 8 + 1) * 8 + beyond
    return functional.pad(rows, (0, length - rows.size(1)), value=PAD)


class TranslationTask:
    """A transformer over pairs of sentences."""

    def __init__(self, setting: Setting, model: Transformer, train: Pairs, valid: Pairs) -> None:
        spec = setting.spec
        self._setting, self._spec, self._device = setting, spec, setting.device
        self.model = model.to(setting.device)
        self.modules: Mapping[str, nn.Module] = {"model": self.model}
        self._source, self._target = grid(train.source).to(setting.device), grid(train.target, 1).to(setting.device)
        # of a target all words are read or predicted but not both: the last is only predicted
        self._source_words, self._target_words = train.source.lengths, train.target.lengths - 1
        count = len(valid) if spec.limit is None else min(len(valid), spec.limit * spec.batch)
        self._valid_source = grid(valid.source)[:count].to(setting.device)
        self._valid_target = grid(valid.target, 1)[:count].to(setting.device)
        self._valid_words = valid.source.lengths[:count], valid.target.lengths[:count] - 1
        self._order: tuple[Tensor, ...] = ()
        self._kinds: list[str] = []
        self._loss: Callable[[Tensor, Tensor, int, int], Tensor] = self._summed_loss
        if spec.compiled:
            self._loss = torch.compile(self._summed_loss, dynamic=False)

    def begin_epoch(self, epoch: int) -> int:
        order = torch.randperm(len(self._source_words), generator=stream(self._spec.seed, epoch, "order"))
        batches = order.split(self._spec.batch)[: self._spec.limit]
        self._kinds = [
            "x".join(
                str(part) for part in (len(rows), *_capacities(self._source_words[rows], self._target_words[rows]))
            )
            for rows in batches
        ]
        self._order = order.to(self._device).split(self._spec.batch)
        return len(batches)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        rows = self._order[index]
        return self._source.index_select(0, rows), self._target.index_select(0, rows)

    def kind(self, index: int) -> str:
        """Sentences, and rows for their German and for their English words."""
        return self._kinds[index]

    def lr_factor(self, index: int) -> float:
        return 1.0

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        source, target = batch
        _, source_rows, target_rows = map(int, kind.split("x"))
        optimizer = optimizers["model"]
        optimizer.zero_grad(set_to_none=True)
        summed = descend(optimizer, self._loss(source, target, source_rows, target_rows))
        return summed / (target[:, 1:] != PAD).sum()

    @torch.no_grad()
    def evaluate(self, final: bool) -> Mapping[str, float]:
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        source_words, target_words = self._valid_words
        for start in range(0, len(target_words), AT_ONCE):
            here = slice(start, start + AT_ONCE)
            rows = _capacities(source_words[here], target_words[here])
            logits, labels = self._predict(self._valid_source[here], self._valid_target[here], *rows)
            loss = functional.cross_entropy(logits.float(), labels, ignore_index=PAD, reduction="sum")
            right = ((logits.argmax(-1) == labels) & (labels != PAD)).sum()
            sums += torch.stack([loss.double(), right.double()])
        self.model.train()
        loss_sum, right_sum = sums.tolist()
        words = int(target_words.sum())
        return {"accuracy": 100 * right_sum / words, "valid_ppl": perplexity(loss_sum / words)}

    def extra_state(self) -> dict[str, Any]:
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        pass

    def _predict(self, source: Tensor, target: Tensor, source_rows: int, target_rows: int) -> tuple[Tensor, Tensor]:
        """Logits and labels of every target word after the first; rows to spare are labelled as padding."""
        read, labels = target[:, :-1], target[:, 1:]
        source_layout, target_layout = packed(source != PAD, source_rows), packed(labels != PAD, target_rows)
        with self._setting.autocast():
            logits = self.model.logits(source, source_layout, read, target_layout)
        return logits, target_layout.row(labels)

    def _summed_loss(self, source: Tensor, target: Tensor, source_rows: int, target_rows: int) -> Tensor:
        return smoothed_loss(*self._predict(source, target, source_rows, target_rows))


def _capacities(source_words: Tensor, target_words: Tensor) -> tuple[int, int]:
    sentences = len(source_words)
    return capacity(sentences, int(source_words.sum())), capacity(sentences, int(target_words.sum()))
