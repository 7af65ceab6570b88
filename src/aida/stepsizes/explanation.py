"""What an optimizer does with each of its groups, in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from aida._step.hyper import from_group
from aida._step.layers import LAYER_KEYS, ONE_LAYER_KEYS, layers_of
from aida._step.sharding import is_dtensor, local
from aida._step.storage import ROUNDINGS, STORAGE_DEFAULTS, STORAGE_KEYS, storage_of
from aida.backends.choice import kind_of
from aida.catalog import reading_for, unwrapped
from aida.optimizer import Aida
from aida.readings import Group, Reading
from aida.stepsizes._findings import findings
from aida.stepsizes.probe import hyper_values, method_of


def explain(optimizer: Optimizer) -> str:
    """Describe each group of an optimizer: its stepsize and bound, where eps is, its path, its weight decay.

    After some steps it also says whether eps decides the stepsizes, which updates bf16 and fp16 parameters lose,
    and what to try: one measurement of a :class:`StepsizeProbe`, with the current lr. If parameters are sharded, it
    is about the shards of this rank.

    Args:
        optimizer (Optimizer): one of the catalog, or torch's Adam, AdamW, RAdam or NAdam.

    Returns:
        str: a few lines per group, to be printed.
    """
    optimizer = unwrapped(optimizer)
    reading = reading_for(optimizer)
    found = findings(optimizer, reading)
    lines = []
    for index, group in enumerate(optimizer.param_groups):
        elements = sum(p.numel() for p in group["params"])
        values = (f"{key} {_short(value)}" for key, value in hyper_values(group).items() if value is not None)
        lines += [
            f"{method_of(optimizer)}, group {index}: {_counted(len(group['params']), 'tensor')}, {elements:,} elements",
            f"  values        {', '.join(values)}",
            f"  stepsize      {reading.about}",
            f"  its bound     {_bound(reading, group)}",
            f"  eps           {reading.eps}",
            *found[index],
            f"  weight decay  {reading.weight_decay(group)}",
            f"  path          {_path(optimizer, group)}",
        ]
        if isinstance(optimizer, Aida) and any(group.get(key) != STORAGE_DEFAULTS[key] for key in STORAGE_KEYS):
            lines.append(f"  storage       {_storage(group)}")
        keys = {key: group[key] for key in LAYER_KEYS if group.get(key) != ONE_LAYER_KEYS[key] and key in group}
        if keys:
            count = sum(layers_of(p, group).count for p in group["params"])
            given = ", ".join(f"{key} {_short(value)}" for key, value in keys.items())
            lines.append(f"  layers        {count}, each with its own projections ({given})")
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_short, value)) + ")"
    if isinstance(value, Tensor):
        return "in a tensor" if value.device.type != "cpu" else f"{value.item():g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bound(reading: Reading, group: Group) -> str:
    bound = reading.bound(group)
    if bound is None:
        return "no finite bound is known"
    if not reading.eps_inside:
        return f"{bound:.4g}"
    beta1 = float(group["betas"][0])
    # SGD's momentum adds the whole gradient, the average of an adaptive method only 1 - beta1 of it
    lr = float(group["lr"]) * bound * (1 - beta1)
    return f"{bound:.4g}; small gradients reach it, and the update is then SGD with momentum {beta1:g} and lr {lr:.4g}"


def _path(optimizer: Optimizer, group: dict[str, Any]) -> str:
    if not isinstance(optimizer, Aida):
        return _flags(group)
    kinds: Counter[str] = Counter()
    hyper = from_group(group)
    for p in group["params"]:
        # without a gradient, assume one like the parameter
        kind = kind_of(local(p), local(p if p.grad is None else p.grad), group, hyper)
        sharded = ", sharded" if is_dtensor(p) else ""
        kinds[f"{kind} on {p.device.type} in {str(p.dtype).removeprefix('torch.')}{sharded}"] += 1
    return "; ".join(f"{label} ({_counted(number, 'tensor')})" for label, number in kinds.items())


def _storage(group: dict[str, Any]) -> str:
    """In which precision the state is stored, and how parameters are rounded."""
    states: Counter[str] = Counter()
    roundings: Counter[str] = Counter()
    for p in group["params"]:
        storage = storage_of(p, group, layers_of(p, group))
        states[f"{storage.state} state"] += 1
        roundings[f"{ROUNDINGS[storage.rounding]} parameters"] += storage.rounding != "nearest"
    return "; ".join(f"{name} ({_counted(number, 'tensor')})" for name, number in (states + roundings).items())


def _flags(group: Group) -> str:
    if group.get("fused"):
        return "fused (asked for)"
    if group.get("foreach") is not None:
        return "foreach (asked for)" if group["foreach"] else "one tensor at a time (asked for)"
    return "foreach on an accelerator, one tensor at a time on a CPU (foreach=None)"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
