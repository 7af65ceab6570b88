"""The one error of the data room: a line that says what is wrong, where it was looked for, and what mends it."""

from __future__ import annotations


class DataError(RuntimeError):
    """A data set is missing, damaged, or could not be fetched."""
