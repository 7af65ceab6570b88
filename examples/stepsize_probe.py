"""Inspect an optimizer: explain(), a probe that records its stepsizes, and a figure of them.

python examples/stepsize_probe.py      # writes into runs/stepsize-probe
"""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from aida import Aida, StepsizeProbe
from aida.stepsizes import JsonLines, explain, read_jsonl
from aida.stepsizes.drawing import save
from aida.stepsizes.plots import draw

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("this example trains on the digits of scikit-learn: pip install scikit-learn") from None

STEPS, BATCH = 300, 64
FOLDER = Path("runs/stepsize-probe")
device = "cuda" if torch.cuda.is_available() else "cpu"

pixels, digits = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(digits, device=device)

logs = []
for method in (torch.optim.AdamW, Aida):
    torch.manual_seed(0)
    # GELU: behind a dead ReLU gradients are zero, and the stepsizes of AdamW there are 1/eps = 1e8
    layers = OrderedDict(
        conv1=nn.Conv2d(1, 16, 3, padding=1), gelu1=nn.GELU(), conv2=nn.Conv2d(16, 32, 3, padding=1), gelu2=nn.GELU(),
        pool=nn.MaxPool2d(2), flat=nn.Flatten(), hidden=nn.Linear(512, 64), gelu3=nn.GELU(), output=nn.Linear(64, 10),
    )  # fmt: skip
    model = nn.Sequential(layers).to(device)
    optimizer = method(model.parameters(), lr=1e-3)
    print(explain(optimizer))

    path = FOLDER / method.__name__ / "stepsizes.jsonl"
    path.unlink(missing_ok=True)  # a sink appends to an existing file
    with JsonLines(path) as sink:
        probe = StepsizeProbe(optimizer, model.named_parameters(), every=10, sink=sink, weights_only=True)
        for _ in range(STEPS):
            batch = torch.randint(len(labels), (BATCH,), device=device)
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        probe.close()
    for layer in probe.last.layers:
        print(f"  {layer.layer:13} mean {layer.mean:8.2f}  std {layer.std:8.2f}  at the bound {layer.at_bound:.1%}")
    print(f"{method.__name__} on {device}: largest layer mean / smallest {probe.last.across.spread:.2f}\n")
    logs.append(read_jsonl(path))

for path in save(draw(logs), FOLDER / "stepsizes"):
    print(path)
