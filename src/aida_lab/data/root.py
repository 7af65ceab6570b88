"""The data root: the folder from the argument, else from ``AIDA_DATA``, else the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def data_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The data root as an absolute path. Neither creates nor reads anything."""
    if given is not None:
        return Path(given).expanduser().absolute()
    named = os.environ.get("AIDA_DATA")
    if named:
        return Path(named).expanduser().absolute()
    # the XDG specification ignores relative paths
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "aida"
