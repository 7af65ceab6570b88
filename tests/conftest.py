"""For all tests: switches that are torch's, process-wide, and must not reach from one test into another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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
