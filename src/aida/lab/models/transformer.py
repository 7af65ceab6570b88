"""The transformer for translation: 48,978,432 parameters with the 9,521 words of Multi30k.

Post-LN as in the first transformers, with a layer norm after the embedding dropout; no bias in attentions;
xavier_uniform on every matrix. One matrix embeds the source, embeds the target and projects onto the
vocabulary, where the logits are scaled by d_model^−½ because its entries are sized for embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

#: The public code's; torch's default is ten times that.
NORM_EPS = 1e-6


class Attention(nn.Module):
    """Multi-head attention with its residual and layer norm."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(d_model, eps=NORM_EPS)

    def forward(self, x: Tensor, memory: Tensor, *, seen: Tensor | None = None, causal: bool = False) -> Tensor:
        """``x`` attends to ``memory`` where ``seen`` is true, or to itself and what is before it where ``causal``."""
        mixed = functional.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(memory)),
            self._split(self.value(memory)),
            attn_mask=seen,
            dropout_p=self.dropout.p if self.training else 0.0,
            is_causal=causal,
        )
        out: Tensor = self.norm(x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """(batch, length, d_model) to (batch, heads, length, d_model / heads)."""
        split: Tensor = x.unflatten(-1, (self.heads, -1))
        return split.transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear maps at every position, with their residual and layer norm."""

    def __init__(self, d_model: int, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_inner)
        self.out = nn.Linear(d_inner, d_model)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(d_model, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.dropout(self.out(functional.relu(self.inner(x)))))
        return out


class EncoderLayer(nn.Module):
    """Self-attention over the source, then the feed-forward."""

    def __init__(self, d_model: int, d_inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(d_model, heads, dropout)
        self.feed_forward = FeedForward(d_model, d_inner, dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        out: Tensor = self.feed_forward(self.attention(x, x, seen=seen))
        return out


class DecoderLayer(nn.Module):
    """Causal self-attention over the target, attention to the source, then the feed-forward."""

    def __init__(self, d_model: int, d_inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(d_model, heads, dropout)
        self.source_attention = Attention(d_model, heads, dropout)
        self.feed_forward = FeedForward(d_model, d_inner, dropout)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        # Padding is on the right, so the causal mask alone keeps every word from it; a mask tensor that
        # said so again would only shut out the fastest attention kernels.
        x = self.attention(x, x, causal=True)
        out: Tensor = self.feed_forward(self.source_attention(x, memory, seen=seen))
        return out


class Transformer(nn.Module):
    """Encoder and decoder over one shared vocabulary; sentences are rows, padded **on the right** with ``pad``."""

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
        self.encoder = nn.ModuleList(EncoderLayer(d_model, d_inner, heads, dropout) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, d_inner, heads, dropout) for _ in range(layers))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits ``(batch, target length, vocabulary)`` of the word after each of ``target`` (batch, length)."""
        return self.decode(target, self.encode(source), source)

    def encode(self, source: Tensor) -> Tensor:
        """The source sentences ``(batch, length)`` as vectors ``(batch, length, d_model)``."""
        seen = self._seen(source)
        x: Tensor = self.source_norm(self._embed(source))
        for layer in self.encoder:
            x = layer(x, seen)
        return x

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """Logits given the encoded source; ``source`` itself says where ``memory`` is padding."""
        seen = self._seen(source)
        x: Tensor = self.target_norm(self._embed(target))
        for layer in self.decoder:
            x = layer(x, memory, seen)
        logits = functional.linear(x, self.embedding.weight)
        return logits * self.logit_scale

    def _seen(self, source: Tensor) -> Tensor:
        """Which source words may be attended to, shaped to broadcast over heads and queries."""
        return (source != self.pad)[:, None, None, :]

    def _embed(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        if length > self.positions.size(0):
            raise ValueError(
                f"a sentence of {length} tokens is longer than the {self.positions.size(0)} positions; "
                "shorten it or build the Transformer with a larger `longest`"
            )
        out: Tensor = self.dropout(self.embedding(tokens) + self.positions[:length])
        return out


def sinusoid(length: int, width: int) -> Tensor:
    """Position p, feature j: sin (even j) or cos (odd j) of p / 10000^(2·(j//2)/width), in float64 until the end."""
    pairs = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10_000.0**pairs
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()
