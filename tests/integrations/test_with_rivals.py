"""The optimizers of the extra ``rivals`` train in the lab, and a stopped run of one resumes with the same result."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from aida_lab.experiments import find_experiment
from aida_lab.external import RIVALS
from aida_lab.request import RunRequest
from stopped_runs import run_in_two_pieces

if find_spec("schedulefree") is None or find_spec("pytorch_optimizer") is None:
    pytest.skip("needs the extra rivals", allow_module_level=True)

pytestmark = pytest.mark.integrations


@pytest.mark.parametrize("name", [each.name for each in RIVALS] + ["pytorch_optimizer:SOAP+adamw"])
def test_a_rival_learns_the_digits_and_resumes_with_the_same_result(name: str, tmp_path: Path) -> None:
    (spec,) = RunRequest(find_experiment("digits"), (name,), {"lr": 2e-3}, epochs=4).specs()
    whole, resumed = run_in_two_pieces(spec, tmp_path)
    assert whole["best"] > 60, "ten classes: guessing gives 10"
    assert resumed == whole
