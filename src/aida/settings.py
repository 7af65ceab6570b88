"""The experiments by name, and the values the paper's appendix gives for them.

Values that the appendix fixes go into an entry's ``tuned``, values that it searched into ``searched``;
where both are silent the optimizer's default holds. ``digits`` is not of the paper: its values are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Values = Mapping[str, Any]

#: Experiments that share a table of the appendix.
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cifar": ("vgg11-cifar10", "vgg11-cifar100", "resnet34-cifar10", "resnet34-cifar100"),
        "lstm": ("lstm1-ptb", "lstm2-ptb", "lstm3-ptb"),
        "transformer": ("transformer-multi30k",),
        "wgan": ("wgan-gp-cifar10",),
        "imagenet": ("resnet18-imagenet",),
        "digits": ("digits",),
    }
)

EXPERIMENTS = tuple(name for names in FAMILIES.values() for name in names)

#: What the adaptive methods of one table have in common; the lstm table searches lr.
ADAPTIVE: Mapping[str, Values] = MappingProxyType(
    {
        "cifar": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 5e-4},
        "lstm": {"betas": (0.9, 0.999), "weight_decay": 1.2e-6},
        "transformer": {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.0},
        "wgan": {"lr": 2e-4, "betas": (0.5, 0.999), "weight_decay": 0.0},
        "digits": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    }
)


def across(settings: Mapping[str, Values]) -> Mapping[str, Values]:
    """Settings by experiment, from settings by family or by experiment; both frozen."""
    found: dict[str, Values] = {}
    for key, values in settings.items():
        for name in FAMILIES.get(key, (key,)):
            if name not in EXPERIMENTS:
                raise ValueError(f"{name!r} is no experiment; known are {', '.join(EXPERIMENTS)}")
            found[name] = MappingProxyType(dict(values))
    return MappingProxyType(found)


def adaptive(settings: Mapping[str, Values]) -> Mapping[str, Values]:
    """The common values of the adaptive methods, with a method's own over them, by experiment."""
    families = {**ADAPTIVE, **settings}
    return across({family: {**ADAPTIVE.get(family, {}), **settings.get(family, {})} for family in families})


def decades(first: int, last: int, stride: int = -1) -> tuple[float, ...]:
    """``decades(-2, -8)`` is (1e-2, 1e-3, ..., 1e-8)."""
    return tuple(float(f"1e{exponent}") for exponent in range(first, last + (1 if stride > 0 else -1), stride))
