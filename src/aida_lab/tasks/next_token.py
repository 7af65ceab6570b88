"""Next-token prediction: a GPT on one long text, cut into windows of its context.

The text is read once without repetition, in random order, before any of it is read again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from aida_lab import distributed
from aida_lab.data.pysource import TokenSplits
from aida_lab.models.gpt import GPT
from aida_lab.sharding import my_rows
from aida_lab.task import Task, TaskContext, backward_and_step, stream

CLIP = 1.0


class NextTokenTask(Task):
    """Trains a GPT, ``steps`` steps per epoch, and measures the mean loss per token of the validation text."""

    def __init__(self, context: TaskContext, model: GPT, source: TokenSplits, steps: int) -> None:
        super().__init__(context, model=model)
        self.model, self._steps = model, steps
        self._train, self._valid = (_windows(tokens, model.context) for tokens in (source.train, source.valid))
        self._train, self._valid = self._train.to(context.device), self._valid.to(context.device)
        self._bytes_per_token = source.valid_bytes / len(source.valid)
        self._order = torch.empty(0, dtype=torch.int64)
        self._loss = self._compiled(self._summed_loss)

    def begin_epoch(self, epoch: int) -> int:
        steps, batch, count = self._limited(self._steps * self._spec.batch), self._spec.batch, len(self._train)
        first = epoch * steps
        passes = range(first // count, (first + steps - 1) // count + 1)
        order = torch.cat([torch.randperm(count, generator=stream(self._spec.seed, each, "order")) for each in passes])
        start = first - passes.start * count
        self._order = order[start : start + steps].to(self._device)
        return steps // batch

    def batch(self, index: int) -> tuple[Tensor, ...]:
        return (self._train[my_rows(self._order[index * self._spec.batch : (index + 1) * self._spec.batch])],)

    def kind(self, index: int) -> str:
        return "step"

    def step(self, kind: str, batch: tuple[Tensor, ...], optimizers: Mapping[str, Optimizer]) -> Tensor:
        optimizer = optimizers["model"]
        optimizer.zero_grad(set_to_none=True)
        # the optimizer gets the mean of the gradients over processes, which may have other numbers of rows
        share = self._spec.batch * self.model.context / distributed.world()
        return distributed.mean(backward_and_step(optimizer, self._loss(*batch) / share, CLIP))

    @torch.no_grad()
    def evaluate(self, final: bool) -> Mapping[str, float]:
        self.model.eval()
        windows = self._valid[: self._limited(len(self._valid))]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for some in windows.split(self._spec.batch):
            total += self._summed_loss(my_rows(some)).double()
        self.model.train()
        loss = float(distributed.total(total)) / (len(windows) * self.model.context)
        return {"valid_loss": loss, "bits_per_byte": loss / math.log(2) / self._bytes_per_token}

    def _summed_loss(self, windows: Tensor) -> Tensor:
        """The cross-entropy of the tokens of some windows after their first, summed."""
        windows = windows.long()
        with self._context.autocast():
            logits = self.model(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="sum")


def _windows(tokens: Tensor, context: int) -> Tensor:
    """Rows of ``context`` tokens and the one after them, which is the first of the next row. The rest is dropped."""
    if len(tokens) <= context:
        raise ValueError(f"a text of {len(tokens)} tokens is shorter than a context of {context}")
    return tokens.unfold(0, context + 1, context)
