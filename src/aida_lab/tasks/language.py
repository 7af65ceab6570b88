"""Language modelling with truncated backpropagation through time: random segment lengths, two penalties, perplexity.

The training loss includes penalties on the last layer. A step returns the cross entropy alone: the public code logs it,
and it is comparable with a perplexity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from aida_lab.data.text import batchify
from aida_lab.models.lstm import AwdLstm
from aida_lab.task import Task, TaskContext, backward_and_step, perplexity, stream
from aida_lab.tasks.lstm_evaluation import mean_loss

#: Typical number of words in a segment. The learning rate of a step is proportional to the segment length.
BPTT = 70
#: Weights of the activation penalty and the temporal activation penalty.
ACTIVATION, TEMPORAL = 2.0, 1.0
CLIP = 0.25


class Segment(NamedTuple):
    """The part of the text that one step reads."""

    start: int
    length: int
    drawn: int  #: length before truncation at the end of an epoch; it determines the learning rate


def segments(words: int, generator: torch.Generator) -> list[Segment]:
    """The segments of an epoch over columns of ``words`` words: 70 (with probability 0.05, 35) ± 5 words, at least 5.

    Every segment predicts at least two words, which the temporal penalty needs.
    """
    most = words // 5 + 1
    halved = torch.rand(most, generator=generator, dtype=torch.float64) >= 0.95
    normal = torch.randn(most, generator=generator, dtype=torch.float64)
    drawn = (torch.where(halved, BPTT / 2, float(BPTT)) + 5 * normal).long().clamp_(min=5)
    starts = drawn.cumsum(0) - drawn
    return [
        Segment(start, min(length, words - 1 - start), length)
        for start, length in zip(starts.tolist(), drawn.tolist(), strict=True)
        if start < words - 2
    ]


class LanguageTask(Task):
    """An AWD-LSTM over columns of text.

    ``train`` are the word ids of the training text, ``measured`` the columns of text, ``(length, batch)``, for each
    reported perplexity by its name.
    """

    def __init__(self, context: TaskContext, model: AwdLstm, train: Tensor, measured: Mapping[str, Tensor]) -> None:
        spec = context.spec
        if spec.compiled:
            raise ValueError(
                "compiled=True has no effect on an LSTM, whose time goes into cuDNN's calls; use compiled=False"
            )
        super().__init__(context, model=model)
        self.model = model
        self._train = batchify(train, spec.batch).to(context.device)
        longest = None if spec.limit is None else spec.limit * BPTT + 1
        self._measured = {name: columns[:longest].to(context.device) for name, columns in measured.items()}
        # the LSTM state after the last step; updated in place, because CUDA graphs write into these tensors
        self._state = self.model.initial_state(spec.batch)
        self._epoch = -1
        self._segments: list[Segment] = []

    def begin_epoch(self, epoch: int) -> int:
        if epoch != self._epoch:  # otherwise the state was just loaded from a checkpoint of this epoch
            self._epoch = epoch
            for part in self._parts():
                part.zero_()
        self._segments = segments(len(self._train), stream(self._spec.seed, epoch, "bptt"))[: self._spec.limit]
        return len(self._segments)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        start, length, _ = self._segments[index]
        return self._train[start : start + length], self._train[start + 1 : start + 1 + length]

    def kind(self, index: int) -> str:
        return str(self._segments[index].length)

    def lr_factor(self, index: int) -> float:
        return self._segments[index].drawn / BPTT

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        words, following = batch
        optimizer = optimizers["model"]
        optimizer.zero_grad(set_to_none=True)
        with self._context.autocast():
            out = self.model(words, self._state)
            entropy = functional.cross_entropy(out.logits.flatten(0, 1).float(), following.flatten())
            activation = out.dropped.pow(2).mean()
            temporal = (out.raw[1:] - out.raw[:-1]).pow(2).mean()
            loss = entropy + ACTIVATION * activation + TEMPORAL * temporal
        backward_and_step(optimizer, loss, CLIP)
        # after the backward pass, which reads the initial state of the segment
        after = [part.detach() for layer in out.state for part in layer]
        for part, new in zip(self._parts(), after, strict=True):
            part.copy_(new)
        return entropy.detach()

    def evaluate(self, final: bool) -> Mapping[str, float]:
        self.model.eval()
        with torch.no_grad(), self._context.autocast():
            losses = torch.stack([mean_loss(self.model, columns) for columns in self._measured.values()]).tolist()
        self.model.train()
        return {name: perplexity(loss) for name, loss in zip(self._measured, losses, strict=True)}

    def extra_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "state": [part.clone() for part in self._parts()]}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]
        for part, kept in zip(self._parts(), state["state"], strict=True):
            part.copy_(kept)

    def _parts(self) -> list[Tensor]:
        return [part for layer in self._state for part in layer]
