"""The transformer for translation: 48,978,432 parameters with the 9,521 words of Multi30k.

Post-LN as in the first transformers, with a layer norm after the embedding dropout, attention without bias, and
xavier_uniform on every matrix. Source embedding, target embedding and output projection share one matrix. Its entries
are scaled for embedding, so the logits are multiplied by d_model^−½.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

#: As in the public code; torch's default is ten times larger.
NORM_EPS = 1e-6


class Segments(NamedTuple):
    """Which sentence and which position each token of a ``(rows, width)`` batch belongs to.

    A row may hold several sentences (sequence packing). Only attention must keep them apart; everything else acts on
    single tokens.
    """

    sentences: Tensor  #: sentence ids; padding has an id that no sentence of its row has
    positions: Tensor  #: distance from the start of the sentence

    def attention_mask(self, other: Segments, *, causal: bool = False) -> Tensor:
        """``(rows, width, other width)``: True if a token may attend to a token of ``other``.

        It may if both belong to the same sentence of the same row and, if ``causal``, the other is not later.
        """
        mask = self.sentences[:, :, None] == other.sentences[:, None, :]
        return mask & (self.positions[:, :, None] >= other.positions[:, None, :]) if causal else mask

    @classmethod
    def one_per_row(cls, is_token: Tensor) -> Segments:
        """One sentence per row; ``is_token`` is False at padding."""
        return cls(is_token.int(), torch.arange(is_token.size(1), device=is_token.device).expand(is_token.shape))


class Attention(nn.Module):
    """Multi-head attention with residual and layer norm."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(d_model, eps=NORM_EPS)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        """The tokens ``x`` (rows, width, d_model) attend to those of ``memory``, or to one another, where ``mask``."""
        if memory is None:
            query, key, value = self._split(x, self.query, self.key, self.value)
        else:
            (query,) = self._split(x, self.query)
            key, value = self._split(memory, self.key, self.value)
        mixed = attend(query, key, value, mask, self.dropout.p if self.training else 0.0)
        out: Tensor = self.norm(x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
        return out

    def _split(self, x: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
        """Apply each of ``maps`` to ``x``; results are (rows, heads, width, d_model / heads)."""
        # one product for all maps: the 512 columns of one do not fill a GPU
        weight = torch.cat([each.weight for each in maps]) if len(maps) > 1 else maps[0].weight
        parts: Tensor = functional.linear(x, weight).unflatten(-1, (len(maps), self.heads, -1))
        return parts.permute(2, 0, 3, 1, 4).unbind()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Scaled dot-product attention where ``mask`` (rows, queries, keys) is True.

    Written out, so that compiled code fuses mask, softmax and dropout: the kernels of torch's own function are made for
    long sequences and took a third of a step for sentences of 48 words. A query without any key attends to all keys
    equally; its output is not used.
    """
    scores = (query * query.size(-1) ** -0.5) @ key.transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min).softmax(-1)
    return functional.dropout(weights, dropout).to(value.dtype) @ value


class FeedForward(nn.Module):
    """Two linear layers at every position, with residual and layer norm."""

    def __init__(self, d_model: int, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_inner)
        self.out = nn.Linear(d_inner, d_model)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(d_model, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.dropout(self.out(functional.relu(self.inner(x)))))
        return out


class Layer(nn.Module):
    """Self-attention, attention to the source if ``decodes``, then the feed-forward layers."""

    def __init__(self, d_model: int, d_inner: int, heads: int, dropout: float, *, decodes: bool) -> None:
        super().__init__()
        self.attention = Attention(d_model, heads, dropout)
        self.source_attention = Attention(d_model, heads, dropout) if decodes else None
        self.feed_forward = FeedForward(d_model, d_inner, dropout)

    def forward(
        self, x: Tensor, mask: Tensor, source: Tensor | None = None, source_mask: Tensor | None = None
    ) -> Tensor:
        x = self.attention(x, mask)
        if self.source_attention is not None:
            x = self.source_attention(x, source_mask, source)
        out: Tensor = self.feed_forward(x)
        return out


class Transformer(nn.Module):
    """Encoder and decoder with one shared vocabulary. Sentences are rows of tokens, padded with ``pad``."""

    positions: Tensor

    def __init__(
        self,
        vocabulary: int = 9521,
        *,
        pad: int = 1,
        d_model: int = 512,
        d_inner: int = 2048,
        layers: int = 6,
        heads: int = 8,
        dropout: float = 0.1,
        longest: int = 200,
    ) -> None:
        super().__init__()
        if d_model % (2 * heads):
            raise ValueError(
                f"d_model={d_model} must be a multiple of 2 * heads = {2 * heads}; the paper uses 512 and 8"
            )
        self.pad = pad
        self.logit_scale: float = d_model**-0.5
        self.embedding = nn.Embedding(vocabulary, d_model, padding_idx=pad)
        self.register_buffer("positions", sinusoid(longest, d_model), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.source_norm = nn.LayerNorm(d_model, eps=NORM_EPS)
        self.target_norm = nn.LayerNorm(d_model, eps=NORM_EPS)
        self.encoder, self.decoder = (
            nn.ModuleList(Layer(d_model, d_inner, heads, dropout, decodes=decodes) for _ in range(layers))
            for decodes in (False, True)
        )
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: Tensor, target: Tensor, packed: tuple[Segments, Segments] | None = None) -> Tensor:
        """Logits ``(batch, target length, vocabulary)`` of the next token after each of ``target`` (batch, length).

        ``packed`` are the segments of source and target if rows hold several sentences. A pair must be in the same row
        of both.
        """
        source_segments, target_segments = packed or (
            Segments.one_per_row(source != self.pad),
            Segments.one_per_row(target != self.pad),
        )
        x: Tensor = self.source_norm(self._embed(source, source_segments))
        mask = source_segments.attention_mask(source_segments)
        for layer in self.encoder:
            x = layer(x, mask)
        y: Tensor = self.target_norm(self._embed(target, target_segments))
        mask = target_segments.attention_mask(target_segments, causal=True)
        source_mask = target_segments.attention_mask(source_segments)
        for layer in self.decoder:
            y = layer(y, mask, x, source_mask)
        # scale before the product: there are twenty times as many logits
        return functional.linear(y * self.logit_scale, self.embedding.weight)

    def _embed(self, tokens: Tensor, segments: Segments) -> Tensor:
        length = tokens.size(1)
        if length > self.positions.size(0):
            raise ValueError(
                f"a sentence of {length} tokens is longer than the {self.positions.size(0)} positions; "
                "shorten it or build the Transformer with a larger `longest`"
            )
        out: Tensor = self.dropout(self.embedding(tokens) + self.positions[segments.positions])
        return out


def sinusoid(length: int, width: int) -> Tensor:
    """Position p, feature j: sin (even j) or cos (odd j) of p / 10000^(2·(j//2)/width), computed in float64."""
    pairs = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10_000.0**pairs
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()
