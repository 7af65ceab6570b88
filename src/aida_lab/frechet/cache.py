"""Moments that take minutes to compute and are the same for every run: kept in a file beside the data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aida_lab.data.kept import keep, read_kept
from aida_lab.frechet.moments import Moments

#: Changes with the form of the file, and with how images are prepared for a network.
_FORMAT = 1


def cached_moments(path: Path, origin: str, compute: Callable[[], Moments]) -> Moments:
    """What the file holds, if it is of ``origin``; else what ``compute`` gives, and the file holds it afterwards.

    ``origin`` describes all that the moments depend on.
    """
    stored = read_kept(path, _FORMAT, origin)
    if stored is not None:
        return Moments(int(stored["count"]), stored["mean"], stored["scatter"])
    found = compute()
    content = {"count": found.count, "mean": found.mean, "scatter": found.scatter}
    keep(content, path, _FORMAT, origin, "the features of the real images")
    return found
