"""Gradients of several micro-batches in one step of Aida, their norm clipped inside the step.

python examples/gradient_accumulation.py
"""

import torch
from torch import nn

from aida import Aida

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("this example trains on the digits of scikit-learn: pip install scikit-learn") from None

# - optimizer = Aida(model.parameters(), lr=1e-3)
# + optimizer = Aida(model.parameters(), lr=1e-3, clip_norm=1.0)
#
# -         nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#           optimizer.step()
#
# The same numbers without another pass over the gradients, and p.grad stays as backward() left it.

EPOCHS, BATCH, MICRO_BATCH = 15, 64, 16
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# 1,797 images of 8x8 pixels, every fifth of them kept for testing
pixels, digits = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(digits, device=device)
test = torch.arange(len(labels), device=device) % 5 == 0
train = torch.nonzero(~test).flatten()

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
).to(device)  # fmt: skip
optimizer = Aida(model.parameters(), lr=1e-3, clip_norm=1.0)

for epoch in range(1, EPOCHS + 1):
    total = torch.zeros((), device=device)
    for batch in train[torch.randperm(len(train), device=device)].split(BATCH):
        optimizer.zero_grad()
        for part in batch.split(MICRO_BATCH):
            # divided by len(batch): the parts add up to the batch's mean loss, even if the last part is smaller
            loss = nn.functional.cross_entropy(model(images[part]), labels[part], reduction="sum") / len(batch)
            loss.backward()
            total += loss.detach() * len(batch)
        optimizer.step()
    if epoch % 5 == 0:
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        print(f"epoch {epoch:2d}  train loss {total / len(train):.4f}  test accuracy {accuracy:.2%}")

norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
print(f"norm of the last gradient {norm:.3f}, as backward() left it; the step clips it to 1")
print(f"Aida on {device}, {MICRO_BATCH} images at a time: test accuracy {accuracy:.2%}")
