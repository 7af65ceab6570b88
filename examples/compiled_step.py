"""Aida's step under torch.compile, with a learning rate that changes at every step: compiled once.

    python examples/compiled_step.py

On a CPU torch.compile needs a C++ compiler, and half a minute before the first step.
"""

import time

import torch
from torch import nn
from torch._dynamo.utils import counters

from aida import Aida

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("this example trains on the digits of scikit-learn: pip install scikit-learn") from None

EPOCHS, BATCH = 15, 64
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
optimizer = Aida(model.parameters(), lr=2e-3)
steps = EPOCHS * len(train.split(BATCH))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


@torch.compile
def step():
    optimizer.step()


rates = []
start = time.perf_counter()
for _ in range(EPOCHS):
    for batch in train[torch.randperm(len(train), device=device)].split(BATCH):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        step()
        if not rates:
            print(f"the first step, with its compilation: {time.perf_counter() - start:.0f} s", flush=True)
        rates.append(optimizer.param_groups[0]["lr"])
        # Outside of the compiled function. The lr is a float, which Aida hands to the graph in a tensor;
        # AdamW would be compiled again here, unless its lr is a tensor from the start.
        scheduler.step()

with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
print(f"steps {steps}, learning rates {len(set(rates))}, graphs compiled {counters['stats']['unique_graphs']}")
print(f"Aida on {device}: test accuracy {accuracy:.2%}")
