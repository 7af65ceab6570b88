"""Which eps for a language model: AdamW, then Aida with several eps, in the same loop on Penn Treebank.

    aida data get ptb
    python examples/language_model.py                       # one run takes nine minutes on one core of an EPYC
    python examples/language_model.py --eps 1e-12 --seeds 0 1 2

A small transformer as language models are trained today: the loss is a mean over words, gradients are
clipped, the learning rate warms up and falls along a cosine. Such gradients are small, about 1e-4 an
element here, and an eps of 1e-8, which image classifiers like, leaves Aida little more than SGD with a
small learning rate. Nothing is tuned: lr, betas and schedule are the same for all.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from aida import Aida
from aida_lab.data.text import LanguageSplits, ptb

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 3, 4, 64, 16
WARM_UP = 100


class Block(nn.Module):
    """Causal self-attention, then a feed-forward, each after a layer norm and beside its input."""

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
    """What follows each word; the embedding also reads the words out."""

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
    """Of the words in the rows, each guessed from those before it."""
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


@torch.no_grad()
def valid_loss(model: nn.Module, text: Tensor) -> float:
    """Over the text in rows that begin with nothing in mind; what fills no row falls away."""
    rows = text.unfold(0, LENGTH + 1, LENGTH)
    return sum(loss_of(model, part).item() * len(part) for part in rows.split(64)) / len(rows)


def train(eps: float | None, splits: LanguageSplits, *, steps: int, lr: float, seed: int, device: str) -> float:
    """One run, AdamW where there is no eps; returns the loss on the validation text at its end."""
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
    parser.add_argument("--data", metavar="FOLDER", help="where aida data put it, if not in the usual place")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    splits = ptb(asked.data)
    for eps in (None, *asked.eps):
        name = "AdamW" if eps is None else f"Aida, eps {eps:g}"
        for seed in asked.seeds:
            loss = train(eps, splits, steps=asked.steps, lr=asked.lr, seed=seed, device=device)
            print(f"{name:15}  seed {seed}  validation loss {loss:.4f}  perplexity {math.exp(loss):.1f}", flush=True)


if __name__ == "__main__":
    main()
