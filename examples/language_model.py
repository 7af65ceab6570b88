"""Which eps for a language model? AdamW and Aida with several eps, trained in the same loop on Penn Treebank.

    aida data get ptb
    python examples/language_model.py                       # nine minutes per run on one core of an EPYC
    python examples/language_model.py --eps 1e-12 --seeds 0 1 2

The model is a small transformer, trained like language models today: the loss is a mean over words, gradients
are clipped, and the learning rate has a linear warm-up and a cosine decay. Its gradients are small, about 1e-4
per element. With eps=1e-8, which suits image classifiers, Aida is then little more than SGD with a small
learning rate. Nothing is tuned: lr, betas and schedule are the same for all runs.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aida import Aida
from aida_lab.data import DataError
from aida_lab.data.text import LanguageSplits, ptb

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 3, 4, 64, 16
WARM_UP = 100


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a layer norm before it and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class LanguageModel(nn.Module):
    """Predicts the next word; input and output share the embedding."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.position.weight[: words.shape[1]]
        return self.norm(self.blocks(x)) @ self.embedding.weight.T


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """Mean cross-entropy of each word given the words before it in its row."""
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


@torch.no_grad()
def valid_loss(model: nn.Module, text: Tensor) -> float:
    """Mean loss over rows of the text, each without context from the row before; an incomplete last row is dropped."""
    rows = text.unfold(0, LENGTH + 1, LENGTH)
    return sum(loss_of(model, part).item() * len(part) for part in rows.split(64)) / len(rows)


def train(eps: float | None, splits: LanguageSplits, *, steps: int, lr: float, seed: int, device: str) -> float:
    """Train once, with AdamW if eps is None, and return the final validation loss."""
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    model = LanguageModel(len(splits.words)).to(device)
    text = splits.train.to(device)
    optimizer: Optimizer
    if eps is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    else:
        optimizer = Aida(model.parameters(), lr=lr, eps=eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=order).to(device)
        loss = loss_of(model, text[starts + torch.arange(LENGTH + 1, device=device)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return valid_loss(model, splits.valid.to(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=float, nargs="+", default=[1e-8, 1e-10, 1e-12, 1e-14, 1e-16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--data", metavar="FOLDER", help="folder of the data sets, if it is not the default")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        splits = ptb(asked.data)
    except DataError as error:
        raise SystemExit(str(error)) from None
    for eps in (None, *asked.eps):
        name = "AdamW" if eps is None else f"Aida, eps {eps:g}"
        for seed in asked.seeds:
            loss = train(eps, splits, steps=asked.steps, lr=asked.lr, seed=seed, device=device)
            print(f"{name:15}  seed {seed}  validation loss {loss:.4f}  perplexity {math.exp(loss):.1f}", flush=True)


if __name__ == "__main__":
    main()
