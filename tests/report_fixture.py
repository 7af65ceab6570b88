"""Synthetic run folders, as the lab writes them: curves that learn, seeds that differ, and some that went wrong."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aida.catalog import find
from aida.stepsizes import StepsizeProbe
from aida.stepsizes.sinks import JsonLines
from aida_lab.experiments import experiments
from aida_lab.schedules import Constant
from aida_lab.spec import Experiment, Metric, PaperResult, RunSpec

ACCURACY = Metric("accuracy", "test accuracy, %", "higher")
PERPLEXITY = Metric("valid_ppl", "validation perplexity", "lower")


def experiment(name: str, table: str, metric: Metric = ACCURACY, **changes: Any) -> Experiment:
    """An experiment with the real one's values and without its task, which a report must not ask for."""
    values: dict[str, Any] = {
        "name": name, "title": name.replace("-", " on "), "table": table, "data": (), "task": None,
        "parameters": 10, "epochs": 4, "batch": 8, "schedule": Constant(), "metrics": {"default": metric}, "paper": {},
    }  # fmt: skip
    if name in experiments():
        values["tuning"] = experiments()[name].tuning
    return Experiment(**{**values, **changes})


#: A small world: two columns of one table, one of another, one that is not of the paper.
EXPERIMENTS: Mapping[str, Experiment] = {
    each.name: each
    for each in (
        experiment("digits", ""),
        experiment(
            "lstm1-ptb", "II", PERPLEXITY,
            paper={"aida-k2": PaperResult(81.53), "adam": PaperResult(84.28), "fromage": PaperResult(85.20)},
        ),
        experiment(
            "vgg11-cifar10", "III",
            paper={
                "aida-k2": PaperResult(91.68, 0.16, 7.95), "aida-k1": PaperResult(91.52, 0.05, 7.27),
                "adam": PaperResult(91.20, 0.21, 6.15), "sgd": PaperResult(91.36, 0.07, 5.83),
            },
        ),
        experiment("resnet34-cifar10", "III", paper={"aida-k2": PaperResult(95.57, 0.13, 39.53)}),
    )
}  # fmt: skip

HYPER: Mapping[str, Mapping[str, Any]] = {
    "aida": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-9, "projections": 2},
    "adam": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8},
    "sgd": {"lr": 0.1, "momentum": 0.9},
}


def spec(method: str = "aida-k2", seed: int = 0, hyper: Mapping[str, Any] | None = None, **changes: Any) -> RunSpec:
    """A spec of ``vgg11-cifar10`` as declared above, unless told otherwise."""
    optimizer = "aida" if method.startswith("aida-k") else method
    values = dict(HYPER.get(optimizer, {"lr": 1e-3}))
    if optimizer == "aida":
        values["projections"] = int(method.removeprefix("aida-k"))
    fields: dict[str, Any] = {"experiment": "vgg11-cifar10", "epochs": 4, "batch": 8, "precision": "fp32"}
    return RunSpec(optimizer=optimizer, hyper={**values, **(hyper or {})}, seed=seed, **{**fields, **changes})


def write_run(
    root: Path, wanted: RunSpec, values: list[float], *, metric: Metric = ACCURACY, seconds: float = 1.0,
    device: str = "cpu", losses: list[float] | None = None, **session: Any,
) -> Path:  # fmt: skip
    """A finished run whose metric took these values, epoch by epoch."""
    folder = begin_run(root, wanted, values, metric=metric, seconds=seconds, device=device, losses=losses, **session)
    best = (max if metric.better == "higher" else min)(values)
    write_result(
        folder, state="finished", metric=metric.key, better=metric.better, best=best,
        best_epoch=values.index(best) + 1, last=values[-1], epochs=wanted.epochs, steps=10 * wanted.epochs,
        values={metric.key: values[-1]},
    )  # fmt: skip
    return folder


def write_diverged_run(root: Path, wanted: RunSpec, metric: Metric = ACCURACY) -> None:
    """A run that ended without a loss, after a good start."""
    values = [99.9, 11.0]
    folder = begin_run(root, wanted, values, metric=metric)
    best = (max if metric.better == "higher" else min)(values)
    write_result(
        folder, state="diverged", reason="loss is NaN", metric=metric.key, better=metric.better, best=best,
        best_epoch=values.index(best) + 1, last=values[-1], epochs=2, steps=20, values={},
    )  # fmt: skip


def begin_run(
    root: Path, wanted: RunSpec, values: list[float], *, metric: Metric = ACCURACY, seconds: float = 1.0,
    device: str = "cpu", losses: list[float] | None = None, **session: Any,
) -> Path:  # fmt: skip
    """A run that has got so far and has no result; ``session`` is more of what its process said of itself."""
    folder = root / wanted.key
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(wanted.to_json()))
    session = {"started": "2026-01-01T00:00:00", "versions": {"torch": "2.13"}, "device": device, "git": None,
               "threads": 1, "path": "plain", **session}  # fmt: skip
    (folder / "env.json").write_text(json.dumps({"sessions": [session]}))
    losses = losses or [1 / epoch for epoch in range(1, len(values) + 1)]
    rows = [
        {"epoch": epoch, "step": 10 * epoch, "lr": 1e-3, "loss": loss, metric.key: value, "seconds": seconds,
         "eval_seconds": 0.1}
        for epoch, (value, loss) in enumerate(zip(values, losses, strict=True), start=1)
    ]  # fmt: skip
    (folder / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_result(folder: Path, **content: Any) -> None:
    (folder / "result.json").write_text(json.dumps(content))


def learning_curve(level: float, epochs: int, seed: str, *, lower: bool = False) -> list[float]:
    """A curve with the shape of a schedule with two decays, which ends near ``level``."""
    noise = random.Random(seed)
    level += noise.gauss(0, 0.12)
    found = []
    for epoch in range(1, epochs + 1):
        share = epoch / epochs
        left = 0.12 * math.exp(-6 * share) + 0.05 * (share < 0.5) + 0.012 * (share < 0.8)
        shake = noise.gauss(0, 0.01 if share < 0.5 else 0.002 if share < 0.8 else 0.0006)
        found.append(round(level * (1 + left + abs(shake)) if lower else level * (1 - left - abs(shake)), 4))
    return found


#: The world above with curves that are long enough to look at.
SHOWN: Mapping[str, Experiment] = {name: replace(each, epochs=40) for name, each in EXPERIMENTS.items()}

_LEVELS = {"aida-k2": 0.0, "aida-k1": -0.2, "adabelief": -0.4, "adam": -0.6, "sgd": -0.5}


def write_showcase(root: Path) -> None:
    """Runs of every kind: three seeds of five methods, a search, a shortened search, stepsizes, and trouble."""
    for name, top in (("digits", 97.5), ("lstm1-ptb", 82.0), ("vgg11-cifar10", 91.5)):
        lower = name == "lstm1-ptb"
        metric = PERPLEXITY if lower else ACCURACY
        for number, (method, apart) in enumerate(_LEVELS.items()):
            for seed in range(3):
                wanted = spec(method, seed, experiment=name, epochs=40)
                values = learning_curve(top - (apart if lower else -apart), 40, wanted.key, lower=lower)
                dead = (name, method, seed) == ("digits", "sgd", 2)  # one seed of three that learned nothing
                losses = [2.303] * 40 if dead else None
                write_run(root, wanted, values, metric=metric, seconds=5 + 0.4 * number + 0.1 * seed, losses=losses)
    for eps in (1e-2, 1e-4, 1e-6):
        for epochs in (40, 10):
            wanted = spec("adam", 0, {"eps": eps}, epochs=epochs)
            write_run(root, wanted, learning_curve(90.5 - abs(math.log10(eps) + 4) / 2, epochs, wanted.key))
    begin_run(root, spec("adam", 7, epochs=40), learning_curve(91, 12, "unfinished"))
    failed = begin_run(root, spec("sgd", 8, epochs=40), learning_curve(91, 5, "failed"))
    hostile = "RuntimeError: </script><script>alert(1)</script> & \"quotes\" 'and' \u2028 more"
    (failed / "failed.json").write_text(json.dumps({"error": hostile, "trace": ""}))
    (root / "0123456789abcdef").mkdir()
    (root / "0123456789abcdef" / "spec.json").write_text('{"format": 1, "experim')


def write_stepsizes(folder: Path, optimizer: str) -> None:
    """A few real measurements of a small net, as a run with a probe leaves them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    found = find(optimizer).build(net.parameters(), lr=1e-3)
    with JsonLines(folder / "stepsizes.jsonl") as sink:
        StepsizeProbe(found, net.named_parameters(), every=2, sink=sink)
        for _ in range(12):
            found.zero_grad()
            net(torch.randn(8, 6)).pow(2).mean().backward()
            found.step()
