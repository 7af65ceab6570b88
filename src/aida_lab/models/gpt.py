"""A decoder-only transformer: pre-norm with RMSNorm, learned positions, GELU, an untied head, no biases.

With its default sizes it has 33,825,280 parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Standard deviation of the initial weights.
INIT = 0.02


class Split(nn.ModuleList):
    """Three linear layers, side by side."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self], -1)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a residual.

    ``split``: queries, keys and values have a matrix each. One matrix for the three computes the same.
    """

    def __init__(self, width: int, heads: int, split: bool) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = Split(width) if split else nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.feed_forward_norm(x))))


class GPT(nn.Module):
    """Logits of the next token at every position of ``(rows, context)`` tokens."""

    def __init__(
        self,
        vocabulary: int = 8192,
        *,
        context: int = 512,
        width: int = 512,
        layers: int = 8,
        heads: int = 8,
        split: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, split) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # the sum over all residuals keeps its scale
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=INIT / (2 * layers) ** 0.5 if residual else INIT)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
