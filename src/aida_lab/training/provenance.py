"""What decides a run's numbers besides its spec: the data, and the code of an optimizer outside the catalog.

Checksums of both are recorded with the run. A run whose data or code changed is trained again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aida_lab.data.local import checksum
from aida_lab.data.sets import find
from aida_lab.experiments import find_experiment
from aida_lab.external import source_of
from aida_lab.spec import RunSpec


def provenance(spec: RunSpec, data_root: Path | None) -> dict[str, Any]:
    """For the session of a process that trains the run."""
    reads = find_experiment(spec.experiment).reads(spec.variant)
    found: dict[str, Any] = {"data": {name: checksum(find(name), data_root) for name in reads}}
    if ":" in spec.optimizer:
        found["source"] = source_of(spec.optimizer)
    return found


def changed_since(spec: RunSpec, sessions: Sequence[Mapping[str, Any]], data_root: Path | None) -> str:
    """What is another than in a run's last session, in words; empty if nothing is, or if the session does not say."""
    before = _named(spec, sessions[-1]) if sessions else {}
    if not before:
        return ""
    now = _named(spec, provenance(spec, data_root))
    changed = [name for name in before if name in now and before[name] != now[name]]
    return "; ".join(f"{name} was changed since ({before[name]} before, {now[name]} now)" for name in changed)


def _named(spec: RunSpec, session: Mapping[str, Any]) -> dict[str, Any]:
    """By name, what is known of it."""
    data = session.get("data")
    found = {**(data if isinstance(data, dict) else {}), spec.optimizer: session.get("source")}
    return {name: value for name, value in found.items() if value is not None}
