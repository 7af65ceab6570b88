"""Train a small network on scikit-learn's digits with five optimizers and draw their stepsizes.

    python examples/stepsize_figure.py                     # a minute on two CPU cores
    python examples/stepsize_figure.py --out docs/figures

Writes one folder per method with ``stepsizes.jsonl`` into runs/digits-stepsizes, and a figure of
AdaBelief*, AdaBelief and Aida. lr, betas and eps are those of the paper's figures: 1e-3, (0.9, 0.999)
and 1e-8. The network has GELUs and convolutions, so that no weight has a gradient of exactly zero:
behind a dead ReLU or a pixel that is always blank the stepsize of AdaBelief* and Adam is 1/eps = 1e8,
and a few such weights decide a layer's mean.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from aida.catalog import find
from aida.stepsizes import Measurement, StepsizeProbe
from aida.stepsizes.drawing import save
from aida.stepsizes.plots import draw
from aida.stepsizes.sinks import JsonLines, read_jsonl

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("this example trains on the digits of scikit-learn: pip install scikit-learn") from None

METHODS = ("adabelief-star", "adabelief", "aida", "adam", "adam-plus")
SHOWN = ("adabelief-star", "adabelief", "aida")
RUNS = Path("runs/digits-stepsizes")


def network(width: int) -> nn.Module:
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(1, width, 3, padding=1),
        "gelu1": nn.GELU(),
        "conv2": nn.Conv2d(width, width, 3, padding=1, stride=2),
        "gelu2": nn.GELU(),
        "conv3": nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        "gelu3": nn.GELU(),
        "flat": nn.Flatten(),
        "hidden": nn.Linear(8 * width, 4 * width),
        "gelu4": nn.GELU(),
        "output": nn.Linear(4 * width, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def train(method: str, path: Path, *, steps: int, every: int, seed: int = 0, width: int = 16) -> Measurement:
    """Train with one method, record its stepsizes, and return the last measurement."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)
    images = (images - images.mean()) / images.std()
    targets = torch.tensor(labels)

    torch.manual_seed(seed)
    model = network(width)
    optimizer = find(method).build(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    order = torch.Generator().manual_seed(seed)
    with JsonLines(path) as sink:
        probe = StepsizeProbe(optimizer, model.named_parameters(), every=every, sink=sink, weights_only=True)
        for _ in range(steps):
            rows = torch.randint(0, len(images), (64,), generator=order)
            loss = nn.functional.cross_entropy(model(images[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        probe.close()
    assert probe.last is not None
    return probe.last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RUNS, help="folder for the figure")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    for method in METHODS:
        path = RUNS / method / "stepsizes.jsonl"
        path.unlink(missing_ok=True)
        across = train(method, path, steps=args.steps, every=25, seed=args.seed).across
        print(f"{method:15} spread {across.spread:8.3g}   at the bound {across.at_bound:.1%}   {path}")
    logs = [read_jsonl(RUNS / method / "stepsizes.jsonl") for method in SHOWN]
    for path in save(draw(logs, ("mean", "std")), args.out / "digits-stepsizes"):
        print(path)


if __name__ == "__main__":
    main()
