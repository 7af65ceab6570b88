"""Where data lives: one folder, from the argument, else ``AIDA_DATA``, else the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def data_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The data root as an absolute path; nothing is made and nothing is read."""
    if given is not None:
        return Path(given).expanduser().absolute()
    named = os.environ.get("AIDA_DATA")
    if named:
        return Path(named).expanduser().absolute()
    # the XDG rules let only an absolute path count
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "aida"
