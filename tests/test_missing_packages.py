"""The tests themselves on a machine that only trains: what needs a package that is not there is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import OPTIONAL

#: A pytest plugin: the packages it names are not there.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""

ROOT = Path(__file__).parents[1]


def collected(tmp_path: Path, missing: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "without.py").write_text(WITHOUT.format(missing=missing))
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT / "benchmarks")])
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "without",
            "--collect-only",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            *words,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_tests_for_a_gpu_are_found_without_the_packages_of_searches_and_torchs_own_suite(tmp_path):
    missing = ["expecttest", "msgspec", "optuna", "psycopg", "spacy", "sqlalchemy"]
    assert OPTIONAL.issuperset(missing)
    # not those of integrations: if transformers and datasets are installed, they need sqlalchemy
    found = collected(tmp_path, missing, "-m", "gpu", "--ignore", "tests/integrations")
    assert found.returncode == 0, found.stdout[-3000:]
    assert "test_lab_gpu.py::" in found.stdout
    assert "test_triton_backend.py::" in found.stdout
    assert "needs optuna" in found.stdout
    assert "needs expecttest" in found.stdout


def test_a_package_that_nothing_excuses_ends_the_collection(tmp_path):
    found = collected(tmp_path, ["aida"], "tests/test_lab_request.py")
    assert found.returncode == 2
    assert "No module named 'aida" in found.stdout
