"""Checks of the content of run files, which anybody may have written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aida_lab.runs.files import one_line
from aida_lab.spec import Metric

#: Squares and quotients of numbers up to this one are finite, so means and tests can be computed.
_LARGEST = 1e100
#: Limits: characters of a name, number of hyper-parameters, depth of a list among them.
_LETTERS, _VALUES, _DEPTH = 200, 100, 4


def finite(value: Any) -> float | None:
    """The value as a float; None if it is not a number, not finite or larger than 1e100. Below 1e-100 it is zero."""
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:
        return None
    return float(value) if abs(value) >= 1 / _LARGEST else 0.0


def check_spec(content: Mapping[str, Any]) -> None:
    """ValueError if a field of a spec is not what :class:`aida_lab.spec.RunSpec` declares."""
    for name, (passes, rule) in _FIELDS.items():
        if name in content and not passes(content[name]):
            raise ValueError(f"{name} is {one_line(ascii(content[name]), 80)}, not {rule}")
    if content.get("optimizer") == "aida" and not _whole(0, 1000)(content.get("hyper", {}).get("projections")):
        raise ValueError("hyper has no number of projections, which Aida needs")
    if str(content.get("optimizer")).startswith("aida-k"):
        raise ValueError(f"optimizer is {content['optimizer']!r}, which is what tables call Aida itself")


def check_epochs(rows: Sequence[Mapping[str, Any]]) -> None:
    """ValueError unless the rows of a curve are the epochs 1, 2, 3 and so on."""
    for number, row in enumerate(rows, start=1):
        if type(row.get("epoch")) is not int or row["epoch"] != number:
            raise ValueError(f"line {number} has epoch {one_line(ascii(row.get('epoch')), 40)}, not {number}")


def check_result(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """ValueError unless the best and last values of a result are those of its curve."""
    metric, better = result.get("metric"), result.get("better")
    expected: tuple[Any, Any, Any] = (None, None, None)
    if metric is not None:
        if not _name(metric) or better not in ("higher", "lower"):
            raise ValueError(
                f"its metric is {one_line(ascii(metric), 40)}, and {one_line(ascii(better), 40)} is better"
            )
        expected = best_and_last(Metric(metric, metric, better), rows)
    found = tuple(result.get(name) for name in ("best", "best_epoch", "last"))
    if found != expected or bool in map(type, found):
        raise ValueError(f"it says {_in_words(found)}, and the curve {_in_words(expected)}")


def best_and_last(metric: Metric, rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, int | None, float | None]:
    """The best value of a curve, its epoch, and the value of the last row. A value that is not finite is None."""
    best, best_epoch, value = None, None, None
    for row in rows:
        known: Any = row.get(metric.key)
        value = known if type(known) in (int, float) and abs(known) < math.inf else None
        if value is not None and metric.improves(value, best):
            best, best_epoch = value, row["epoch"]
    return best, best_epoch, value


def _in_words(found: tuple[Any, ...]) -> str:
    best, epoch, last = (one_line(ascii(value), 40) for value in found)
    return f"best {best} in epoch {epoch}, last {last}"


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LETTERS and value.isprintable()


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _values(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _VALUES
        and all(map(_name, value))
        and all(map(_value, value.values()))
    )


def _value(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list):
        return depth < _DEPTH and len(value) <= _VALUES and all(_value(part, depth + 1) for part in value)
    if isinstance(value, str):
        return value == "" or _name(value)
    return value is None or type(value) in (bool, float) or _whole(-(2**64), 2**64)(value)


_COUNT = (_whole(1, 2**31), "a whole number from 1 on")
_STEPS = (_whole(0, 2**53), "a whole number from 0 on")
_NAME = (_name, f"a name of at most {_LETTERS} printable characters")
_SWITCH = (lambda value: type(value) is bool, "true or false")
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "experiment": _NAME, "optimizer": _NAME, "precision": _NAME, "variant": _NAME,
    "hyper": (_values, f"at most {_VALUES} named numbers, words, or short lists of them"),
    "seed": (_whole(-(2**64), 2**64), "a whole number"),
    "epochs": _COUNT, "batch": _COUNT, "warmup": _STEPS, "probe_every": _STEPS,
    "limit": (lambda value: value is None or _COUNT[0](value), "null, or a whole number from 1 on"),
    "compiled": _SWITCH, "deterministic": _SWITCH,
}  # fmt: skip
