"""The AWD-LSTM language model: 5,293,200 / 13,632,400 / 24,221,600 parameters with 1 / 2 / 3 layers.

``weight_drop`` selects one of two forms:

``"correct"``
    DropConnect as published: each forward pass drops random entries of the recurrent matrix, and the
    gradient flows through the others.
``"faithful"``
    The behaviour of the public code behind the paper's table. It wraps the dropped matrix in a new parameter
    in every pass, so the recurrent weights get no gradient and keep their random initial values. The paper's
    perplexities depend on it.

Both draw the same random numbers and compute the same outputs; only the gradient differs.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

WeightDrop = Literal["correct", "faithful"]

#: Hidden and cell state of a layer, each ``(1, batch, width)``.
LayerState = tuple[Tensor, Tensor]


class LanguageOutput(NamedTuple):
    """Inputs of the loss: cross entropy of ``logits`` + 2·mean(dropped²) + 1·mean((raw[1:] − raw[:-1])²)."""

    logits: Tensor  #: ``(length, batch, vocabulary)``
    raw: Tensor  #: output of the last LSTM layer, ``(length, batch, embedding)``
    dropped: Tensor  #: the same after locked dropout: the input of the projection
    state: list[LayerState]  #: initial state of the next segment; detach it between steps


def locked_dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Variational dropout: one mask for all time steps of ``x`` (length, batch, width)."""
    if not training or rate == 0.0:
        return x
    return x * functional.dropout(x.new_ones(1, x.size(1), x.size(2)), rate)


def embedding_row_dropout(embedding: nn.Embedding, tokens: Tensor, rate: float, training: bool) -> Tensor:
    """Embed the tokens and drop whole words of the vocabulary, at all of their occurrences in the batch."""
    vectors: Tensor = embedding(tokens)
    if not training or rate == 0.0:
        return vectors
    kept = functional.dropout(embedding.weight.new_ones(embedding.num_embeddings, 1), rate)
    return vectors * functional.embedding(tokens, kept)


class WeightDropLSTM(nn.Module):
    """One LSTM layer with dropout on its recurrent matrix. Parameters are initialised as in ``torch.nn.LSTM``."""

    def __init__(self, inputs: int, width: int, rate: float, weight_drop: WeightDrop) -> None:
        super().__init__()
        if weight_drop not in ("correct", "faithful"):
            raise ValueError(
                f"weight_drop={weight_drop!r} must be 'correct' (the recurrent weights learn) "
                "or 'faithful' (they stay fixed, as in the public code)"
            )
        self.rate = rate
        self.weight_ih = nn.Parameter(torch.empty(4 * width, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * width, width))
        self.bias_ih = nn.Parameter(torch.empty(4 * width))
        self.bias_hh = nn.Parameter(torch.empty(4 * width))
        bound = 1 / math.sqrt(width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        # A detach in forward would not be enough: weight decay must not change it either, and optimizers skip
        # parameters without a gradient.
        self.weight_hh.requires_grad_(weight_drop == "correct")

    def forward(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        recurrent = functional.dropout(self.weight_hh, self.rate, self.training)
        # At least in float32: under bfloat16 autocast torch casts cuDNN's LSTM to float16, whose gradients need loss
        # scaling. The time of the recurrence goes into its sequence of steps, not into its products.
        weights = [_wide(each) for each in (self.weight_ih, recurrent, self.bias_ih, self.bias_hh)]
        x = _wide(x)
        with torch.autocast(x.device.type, enabled=False):
            out, hidden, cell = torch.lstm(
                x, state, in_one_chunk(weights) if x.is_cuda else weights,
                True, 1, 0.0, self.training, False, False,  # biases, layers, dropout, train, bidirectional, batch_first
            )  # fmt: skip
        return out, (hidden, cell)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype is torch.bfloat16 else x


def in_one_chunk(weights: list[Tensor]) -> list[Tensor]:
    """The weights as views of one buffer in cuDNN's order. Otherwise cuDNN copies them itself, with a warning."""
    parts = torch.cat([weight.flatten() for weight in weights]).split([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]


class AwdLstm(nn.Module):
    """Embedding, LSTM layers, and a projection onto the vocabulary with tied embedding weights.

    Args:
        layers: number of LSTM layers. All have width ``hidden`` except the last, which has width ``embedding``.
        vocabulary: number of words.
        weight_drop: whether the recurrent weights are trained; see the module docstring.
        embedding, hidden: widths.
        dropout_words: dropout rate of whole words (``dropoute`` in the public code).
        dropout_input: locked dropout on the embeddings (``dropouti``).
        dropout_between: locked dropout between layers (``dropouth``).
        dropout_output: locked dropout before the projection (``dropout``).
        dropout_recurrent: rate of the weight drop (``wdrop``).
    """

    def __init__(
        self,
        layers: int,
        vocabulary: int = 10_000,
        weight_drop: WeightDrop = "correct",
        *,
        embedding: int = 400,
        hidden: int = 1150,
        dropout_words: float = 0.1,
        dropout_input: float = 0.4,
        dropout_between: float = 0.25,
        dropout_output: float = 0.4,
        dropout_recurrent: float = 0.5,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers={layers} must be at least 1; the paper uses 1, 2 and 3")
        self.dropout_words = dropout_words
        self.dropout_input = dropout_input
        self.dropout_between = dropout_between
        self.dropout_output = dropout_output
        self.widths = [hidden] * (layers - 1) + [embedding]
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.layers = nn.ModuleList(
            WeightDropLSTM(inputs, width, dropout_recurrent, weight_drop)
            for inputs, width in zip([embedding, *self.widths], self.widths, strict=False)
        )
        self.decoder_bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def initial_state(self, batch: int) -> list[LayerState]:
        """The state before the first word: zeros."""
        zeros = _wide(self.decoder_bias).new_zeros
        return [(zeros(1, batch, width), zeros(1, batch, width)) for width in self.widths]

    def forward(self, tokens: Tensor, state: list[LayerState]) -> LanguageOutput:
        """Predict the next word after each of ``tokens`` (length, batch), starting from ``state``."""
        raw, states = self.read(tokens, state)
        dropped = locked_dropout(raw, self.dropout_output, self.training)
        return LanguageOutput(self.logits(dropped), raw, dropped, states)

    def read(self, tokens: Tensor, state: list[LayerState]) -> tuple[Tensor, list[LayerState]]:
        """The output of the last layer for each token, and the final state."""
        x = embedding_row_dropout(self.embedding, tokens, self.dropout_words, self.training)
        rate = self.dropout_input
        states: list[LayerState] = []
        for layer, before in zip(self.layers, state, strict=True):
            x, after = layer(locked_dropout(x, rate, self.training), before)
            states.append(after)
            rate = self.dropout_between
        return x, states

    def logits(self, dropped: Tensor) -> Tensor:
        """Logits of the next word."""
        return functional.linear(dropped, self.embedding.weight, self.decoder_bias)
