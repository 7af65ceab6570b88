"""For all tests: torch's process-wide switches must not reach from one into another; what needs a GPU has one."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

#: Packages of the extras, which a machine that only trains may lack: what can't be imported without them is skipped.
OPTIONAL = frozenset(
    {"expecttest", "hypothesis", "matplotlib", "msgspec", "optuna", "psycopg", "rich"}
    | {"scipy", "sklearn", "spacy", "sqlalchemy", "typer"}
)


@pytest.fixture(autouse=True)
def own_switches() -> Iterator[None]:
    """A run sets torch's precision and determinism; torch's test library, where a test imports it, forbids that."""
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    before = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    with torch.backends.__allow_nonbracketed_mutation():  # type: ignore[attr-defined]
        yield
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def pytest_configure() -> None:
    """Tests send SIGINT, which a shell ignores for what it starts in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``gpu`` is skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class _Module(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            if (missing or "").partition(".")[0] in OPTIONAL:
                pytest.skip(f"needs {missing}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """A test module that needs a missing package of ``OPTIONAL`` is skipped, and does not end the collection."""
    return _Module.from_parent(parent, path=module_path)
