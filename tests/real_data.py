"""Marks for tests that read the real data sets, where they are."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from aida_lab.data import DataError, local, sets


def needs(data: sets.DataSet, *, tokenised: bool = False) -> pytest.MarkDecorator:
    """A mark that skips where the set is not under the data root, or not ``tokenised`` and spaCy not there."""
    try:
        folder = local.require(data)
    except DataError as error:
        return pytest.mark.skipif(True, reason=str(error))
    ready = all((folder / name).is_file() for name in data.derived) or find_spec("spacy") is not None
    reason = f"{data.title} is not tokenised yet, and spaCy is not there"
    return pytest.mark.skipif(tokenised and not ready, reason=reason)
