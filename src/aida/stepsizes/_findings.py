"""What a measurement says about the groups of an optimizer, in words: see :func:`aida.explain`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from aida._step.sharding import is_dtensor
from aida.readings import Reading
from aida.stepsizes.probe import StepsizeProbe
from aida.stepsizes.records import LayerStepsizes

#: From this share of lost updates on, advice follows.
_MANY = 0.1

_LOW = (torch.bfloat16, torch.float16)

_INDENT = "\n" + 16 * " "


def findings(optimizer: Optimizer, reading: Reading) -> list[list[str]]:
    """The findings about each group, as lines. None about optimizers without stepsizes."""
    groups = optimizer.param_groups
    if reading.stepsize is None:
        return [[] for _ in groups]
    named = [(f"{index}.{place}", p) for index, group in enumerate(groups) for place, p in enumerate(group["params"])]
    with StepsizeProbe(optimizer, named, reading=reading, quantiles=()) as probe:
        measured = probe.measure()
    layers = () if measured is None else measured.layers
    found = []
    for index, group in enumerate(groups):
        mine = [layer for layer in layers if layer.group == index]
        sharded = " on this rank" if any(map(is_dtensor, group["params"])) else ""
        found.append(_findings(mine, reading, sharded))
        if mine and reading.momentum is None and any(p.dtype in _LOW for p in group["params"]):
            found[-1].append(
                "  lost updates  not known of this optimizer, whose update is not lr * stepsize * momentum"
            )
    return found


def _findings(layers: Sequence[LayerStepsizes], reading: Reading, where: str) -> list[str]:
    if not layers:
        return [f"  measured      nothing yet{where}; after some steps, explain says here what happens to the updates"]
    sound = [layer for layer in layers if math.isfinite(layer.mean)]
    lines = []
    if len(sound) < len(layers):
        lines.append(
            f"  not finite    the state of {len(layers) - len(sound)} of {len(layers)} layers holds NaN or inf"
        )
    if reading.eps_inside and sound:
        lines.append(f"  at the bound  {_at_bound(sound, where)}")
    low = [layer for layer in sound if layer.lost is not None]
    if low:
        lines.append(f"  lost updates  {_lost(low, where)}")
    return lines


def _at_bound(layers: Sequence[LayerStepsizes], where: str) -> str:
    # all layers of a group have the same bound
    elements = sum(layer.elements for layer in layers)
    share = sum((layer.at_bound or 0.0) * layer.elements for layer in layers) / elements
    mean = sum(layer.mean * layer.elements for layer in layers) / elements / (layers[0].bound or math.inf)
    found = f"{100 * share:.3g} % of {elements:,} elements{where}; the mean stepsize is {mean:.2g} of the bound"
    if share >= 0.5 or mean >= 0.75:
        said = "eps decides: the update is mostly that of the SGD above"
        tried = "if its lr is far too small for the task, try a smaller eps, with a warm-up or a smaller lr"
    elif mean >= 0.1:
        said, tried = "eps and the gradients decide together", ""
    else:
        said = "the gradients decide: eps bounds few stepsizes"
        tried = "if training fails or is unstable, try a warm-up, a smaller lr or a larger eps"
    return _INDENT.join(filter(None, (found, said, tried)))


def _lost(layers: Sequence[LayerStepsizes], where: str) -> str:
    elements = sum(layer.elements for layer in layers)
    share = sum((layer.lost or 0.0) * layer.elements for layer in layers) / elements
    found = f"{100 * share:.3g} % of {elements:,} bf16 and fp16 elements{where}"
    said = "their last update is at most half a unit in the last place, and is rounded away"
    ours = "stochastic_rounding=True, or " if layers[0].method.startswith("Aida") else ""
    tried = f"try {ours}float32 parameters under autocast" if share >= _MANY else ""
    return _INDENT.join(filter(None, (found, said, tried)))
