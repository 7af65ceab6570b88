"""Aida under automatic mixed precision: fp16 with a GradScaler on a GPU, bf16 without one on a CPU.

python examples/mixed_precision.py
"""

import torch
from torch import nn

from aida import Aida

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("this example trains on the digits of scikit-learn: pip install scikit-learn") from None

EPOCHS, BATCH = 15, 64
device = "cuda" if torch.cuda.is_available() else "cpu"
half = torch.float16 if device == "cuda" else torch.bfloat16
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
# The parameters stay float32, and so does what the optimizer remembers of them.
optimizer = Aida(model.parameters(), lr=1e-3, clip_norm=1.0)
# bf16 has float32's range and needs no scaling: a disabled scaler hands everything through.
scaler = torch.amp.GradScaler(device, enabled=half == torch.float16)

for epoch in range(1, EPOCHS + 1):
    for batch in train[torch.randperm(len(train), device=device)].split(BATCH):
        with torch.autocast(device, dtype=half):
            logits = model(images[batch])
            loss = nn.functional.cross_entropy(logits, labels[batch])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        # With AdamW, clipping means scaler.unscale_(optimizer) and clip_grad_norm_ here. Aida divides
        # by the scale and clips inside the step; gradients that overflowed leave weights and state alone.
        scaler.step(optimizer)
        scaler.update()
    if epoch % 5 == 0:
        with torch.no_grad(), torch.autocast(device, dtype=half):
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        print(f"epoch {epoch:2d}  loss of the last batch {loss.item():.4f}  test accuracy {accuracy:.2%}")

moments = {state["exp_avg"].dtype for state in optimizer.state.values()}
print(f"activations {logits.dtype}, moments {moments}, loss scale {scaler.get_scale():g}")
print(f"Aida on {device}: test accuracy {accuracy:.2%}")
