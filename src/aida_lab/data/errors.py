"""The error of this package: one line with what is wrong, which path was checked, and the command that fixes it."""

from __future__ import annotations


class DataError(RuntimeError):
    """A data set is missing or damaged, or its download failed."""
