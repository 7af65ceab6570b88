"""Train a small network on scikit-learn's digits with Aida: the swap from AdamW is one line.

python examples/digits.py
"""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits
from torch import nn

from aida import Aida

EPOCHS, BATCH = 15, 64


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,797 images of 8x8 pixels, every fifth of them kept for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def main() -> None:
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = Aida(model.parameters(), lr=1e-3)  # was: torch.optim.AdamW(model.parameters(), lr=1e-3)

    start = time.perf_counter()
    for epoch in range(1, EPOCHS + 1):
        total = 0.0
        for batch in torch.randperm(len(labels)).split(BATCH):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        if epoch % 5 == 0:
            with torch.no_grad():
                accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
            print(f"epoch {epoch:2d}  train loss {total / len(labels):.4f}  test accuracy {accuracy:.2%}", flush=True)
    print(f"Aida on digits: {accuracy:.2%} of {len(test_labels)} test images after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
