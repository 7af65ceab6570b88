"""From torch.optim.AdamW to Aida in a plain training loop: two lines.

python examples/plain_loop.py
"""

import torch
from torch import nn

from aida import Aida

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("this example trains on the digits of scikit-learn: pip install scikit-learn") from None

# - from torch.optim import AdamW
# + from aida import Aida
#
# - optimizer = AdamW(
# + optimizer = Aida(
#       model.parameters(),
#       lr=1e-3,
#       weight_decay=0.01,
#   )
#
# Weight decay means the same as with AdamW. Only the default differs: AdamW's is 0.01, Aida's is 0, as in the paper.

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
optimizer = Aida(
    model.parameters(),
    lr=1e-3,
    weight_decay=0.01,
)

for epoch in range(1, EPOCHS + 1):
    for batch in train[torch.randperm(len(train), device=device)].split(BATCH):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 5 == 0:
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        print(f"epoch {epoch:2d}  loss of the last batch {loss.item():.4f}  test accuracy {accuracy:.2%}")
print(f"{type(optimizer).__name__} on {device}: test accuracy {accuracy:.2%}")
