"""Command-line text as values: ``--set eps=1e-9``, ``--seeds 0-4``; and whether an optimizer accepts them."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from aida._suggest import did_you_mean
from aida_lab import ExplainedError

_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None}


class UsageError(ExplainedError, ValueError):
    """A mistake in the arguments of a command; the message is one line with the value, the rule and the way out."""


def parse_values(texts: Iterable[str]) -> dict[str, Any]:
    """Parse ``["projections=1", "betas=0.9,0.99"]`` to ``{"projections": 1, "betas": (0.9, 0.99)}``."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise UsageError(f"--set {text!r} is not NAME=VALUE; write it as --set eps=1e-9")
        if name in found:
            raise UsageError(f"--set {name} is given twice, as {found[name]!r} and {value.strip()!r}; keep one")
        found[name] = _parse_value(name, value.strip())
    return found


def as_assignments(values: Mapping[str, Any]) -> list[str]:
    """Return the texts that :func:`parse_values` parses to exactly these values."""
    return [
        f"{name}={','.join(map(str, value)) if isinstance(value, (tuple, list)) else value}"
        for name, value in values.items()
    ]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse ``0,1,2`` and ``0-4``, also combined; in the given order, without duplicates."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"--seeds {text!r}: {part!r} is not a seed; write them as 0,1,2 or 0-4")
        seeds.update(dict.fromkeys(range(first, last + 1)))
    return tuple(seeds)


def resolve(optimizer: str, kind: type[Any], values: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """Check the hyper-parameters ``values`` of the class ``kind``; the user wrote those in ``given``.

    UsageError for an unknown name, or if the optimizer cannot be built with the values. An integer
    becomes a float if the default is a float, so that ``lr=1`` and ``lr=1.0`` are one run.
    """
    taken, open_ended = _signature(kind)
    for name in given:
        if name not in taken and not open_ended:
            hint = did_you_mean(name, taken)
            raise UsageError(f"{optimizer} has no hyper-parameter {name!r}; {hint}it has {', '.join(taken)}")
    resolved = {name: _like(taken.get(name), value) for name, value in values.items()}
    try:
        # a matrix, because Muon accepts nothing else
        kind([nn.Parameter(torch.zeros(2, 2))], **resolved)
    except (TypeError, ValueError, RuntimeError) as error:
        words = ", ".join(f"{name}={value!r}" for name, value in resolved.items())
        raise UsageError(f"{optimizer} cannot be built with {words or 'its defaults'}: {error}") from None
    return resolved


def _parse_value(name: str, text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", text):  # a word needs no quotes, which the shell would remove
        return text
    try:
        value = ast.literal_eval(text)
        json.dumps(value)  # a spec is JSON: no bytes, no sets
        return value
    except (TypeError, ValueError, SyntaxError):
        raise UsageError(
            f"--set {name}={text}: {text!r} is not a value; write a number (1e-9), true or false, "
            "a tuple (0.9,0.99), or a word"
        ) from None


def _signature(kind: type[Any]) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a class after ``params``, with their defaults, and whether it accepts any name."""
    _, *rest = inspect.signature(kind).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {each.name: each.default for each in rest if each.kind in named}
    return taken, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in rest)


def _like(default: Any, value: Any) -> Any:
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple) and isinstance(value, (tuple, list)) and len(default) == len(value):
        return tuple(map(_like, default, value))
    return value
