"""Numbers as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from aida_lab.report.statistics import Comparison, MeanStd
from aida_lab.spec import PaperResult

MINUS = "−"


def decimals(values: Iterable[float]) -> int:
    """Decimals that suit all values: two for percentages and perplexities, more for small losses."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value))
    middle = sizes[len(sizes) // 2] if sizes else 0.0
    return 2 if middle >= 10 else 3 if middle >= 1 else 4


def number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", MINUS)


def signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    # a difference that rounds to zero has no sign
    return text[1:] if float(text) == 0 else text.replace("-", MINUS)


def spread(found: MeanStd | PaperResult | None, digits: int) -> str:
    """``91.68 ± 0.16``, or only the mean if there is no deviation."""
    if found is None:
        return ""
    return number(found.mean, digits) + (f" ± {found.std:.{digits}f}" if found.std is not None else "")


def interval(found: Comparison, digits: int) -> str:
    """``−0.12 to +0.34``; empty if there is no interval."""
    return " to ".join(signed(end, digits) for end in found.interval or ())


def p_value(found: Comparison | None) -> str:
    if found is None:
        return ""
    if found.p is None:
        return found.reason
    return "< 0.001" if found.p < 0.001 else f"{found.p:.3f}"


def seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"


def settings(values: Mapping[str, Any]) -> str:
    """``lr 0.001, eps 1e-9``."""
    return ", ".join(f"{name} {plain(value)}" for name, value in values.items())


def plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "/".join(map(plain, value))
    if isinstance(value, float) and 0 < abs(value) < 1e-3:  # 1e-4, not 0.0001 or 1e-04
        mantissa, _, exponent = f"{value:.6e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def by_value(text: str) -> list[tuple[bool, float, str]]:
    """A key that sorts texts by their words and the numbers in them: eps 1e-16 before eps 1e-8."""

    def key(word: str) -> tuple[bool, float, str]:
        try:
            return False, float(word.rstrip(",")), ""
        except ValueError:
            return True, 0.0, word

    return [key(word) for word in text.split()]


def commit(name: str) -> str:
    """A commit's first seven digits, and the + that marks changed files."""
    return name[:7] + name[40:] if len(name) >= 40 else name


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
