"""The file that anyone can copy is the class of the package."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

import aida

FILE = Path(__file__).parent.parent / "examples" / "aida_in_one_file.py"
spec = importlib.util.spec_from_file_location("aida_in_one_file", FILE)
assert spec is not None
assert spec.loader is not None
one_file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(one_file)


@pytest.mark.parametrize("projections", range(6))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
def test_it_takes_the_steps_of_the_class(projections: int, dtype: torch.dtype, tolerance: float) -> None:
    values = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1, "projections": projections}
    results = []
    for kind in (one_file.Aida, aida.Aida):
        generator = torch.Generator().manual_seed(0)
        params = [Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in ((3, 4), (5,), ())]
        optimizer = kind(params, **values)
        for _ in range(10):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, dtype=dtype)
            optimizer.step()
        moments = [optimizer.state[p][name] for p in params for name in ("exp_avg", "exp_avg_var")]
        results.append([*(p.detach() for p in params), *moments])
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)


def test_it_is_short_and_stands_alone() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) < 100
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [alias.name for node in imported for alias in node.names] == ["torch"]
