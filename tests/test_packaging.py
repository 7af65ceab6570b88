"""What is published: the sdist, a wheel that is built without a compiler, and the citation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The sdist and the wheel of a copy of the sources, by a machine whose compiler always fails."""
    unwanted = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", folder / "src", ignore=unwanted)
    for name in TOP:
        shutil.copy(ROOT / name, folder)
    (folder / "tests").mkdir()
    shutil.copy(__file__, folder / "tests")
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "bdist_wheel"],
        cwd=folder,
        env={**os.environ, "CC": "/bin/false", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", "77", reason="builds the package")
    folder = tmp_path_factory.mktemp("build")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    return folder / "dist"


def test_a_wheel_holds_the_two_packages_and_nothing_that_only_a_build_needs(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*-py3-none-*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    others = {name for name in names - sources if not name.startswith("aida_lab/report/assets/")}
    assert others == {"aida/py.typed", "aida_lab/py.typed", "aida_lab/data/inception.txt", "aida_lab/data/pysource.txt"}


def test_an_sdist_holds_all_that_a_build_needs_and_no_tests(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    kernel = {str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("_cpu*.[ch]")}
    assert len(kernel) > 5
    assert names >= {*kernel, *TOP}
    assert not any(name.startswith("tests/") for name in names)


def test_without_a_compiler_the_package_is_built_and_steps_on_its_other_paths(dist: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    checked = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "check_installed.py"), "--no-kernel"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert "kernel False, fine" in checked.stdout


def test_a_release_build_without_the_kernel_fails(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77", reason="builds the package")
    built = build(tmp_path, AIDA_REQUIRE_KERNEL="1")
    assert built.returncode != 0
    assert "/bin/false" in built.stderr


def test_the_citation_file_names_the_paper_of_the_readme() -> None:
    citation, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("CITATION.cff", "README.md"))
    entry = dict(re.findall(r"^ +(\w+) += \{(.*)\},?$", readme, flags=re.MULTILINE))
    paper = citation.partition("preferred-citation:")[2]
    assert f"title: {entry['title'].replace('{', '').replace('}', '')}\n" in paper
    assert f"year: {entry['year']}\n" in paper
    assert f"arXiv:{entry['eprint']}\n" in paper
    people = zip(*(re.findall(rf"{part}: (.*)", paper) for part in ("family-names", "given-names")), strict=True)
    assert " and ".join(f"{family}, {given}" for family, given in people) == entry["author"]
