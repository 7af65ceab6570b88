"""The public surface: ``aida.__all__``, its documentation, and which modules are private."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import aida

#: Modules for users and readers. All others are underscored or in an underscored package.
PUBLIC = {
    "aida", "aida.rule", "aida.rounding", "aida.optimizer", "aida.offload", "aida.readings", "aida.catalog",
    *(f"aida.stepsizes{name}" for name in ("", ".probe", ".records", ".sinks", ".trackers", ".explanation", ".plots")),
    "aida.stepsizes.drawing", "aida.integrations", "aida.integrations.optax",
    *(f"aida.integrations.{name}" for name in ("axolotl", "lightning", "timm", "torchtitan", "transformers")),
}  # fmt: skip

#: Packages that are listed as a whole: the paths of an update and the rivals, to be read, not imported.
PACKAGES = ("aida.backends", "aida.baselines")

NAMES = [name for name in aida.__all__ if name != "__version__"]
CALLABLES = [name for name in NAMES if not isinstance(getattr(aida, name), ModuleType)]


def modules() -> set[str]:
    source = Path(aida.__file__).parent
    files = (path.relative_to(source.parent).with_suffix("") for path in source.rglob("*.py"))
    return {".".join(path.parts).removesuffix(".__init__") for path in files}


def test_modules_without_an_underscore_are_the_public_ones() -> None:
    open_to_all = {name for name in modules() if not any(part.startswith("_") for part in name.split("."))}
    assert {name for name in open_to_all if not name.startswith(PACKAGES)} == PUBLIC


@pytest.mark.parametrize("name", aida.__all__)
def test_every_public_name_is_importable(name: str) -> None:
    found: dict[str, Any] = {}
    exec(f"from aida import {name}", found)
    assert found[name] is getattr(aida, name)
    assert name in dir(aida)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'aida' has no attribute 'Adia'"):
        aida.Adia  # noqa: B018


@pytest.mark.parametrize("name", CALLABLES)
def test_every_public_name_lives_in_a_public_module(name: str) -> None:
    assert getattr(aida, name).__module__ in PUBLIC


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    found = getattr(aida, name)
    assert found.__doc__
    assert not found.__doc__.startswith(f"{name}("), "the docstring that dataclasses generate"
    if inspect.isclass(found):
        fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
        methods = {n for n, m in vars(found).items() if inspect.isfunction(m) and not n.startswith("_")} - fields
        assert [n for n in methods if not inspect.getdoc(getattr(found, n))] == []


@pytest.mark.parametrize("name", CALLABLES)
def test_every_argument_is_documented_with_its_type_and_default(name: str) -> None:
    found = getattr(aida, name)
    if dataclasses.is_dataclass(found) and name != "Reading":
        pytest.skip("a record that users receive and do not build")
    parameters = inspect.signature(found).parameters
    entries = dict(re.findall(r"^ {4,8}(\w+) \(([^\n]*?)\):", found.__doc__ or "", re.MULTILINE))
    assert list(entries) == list(parameters)
    for key, parameter in parameters.items():
        assert parameter.annotation is not inspect.Parameter.empty
        documented = re.search(r"default: (.*)", entries[key])
        has_default = parameter.default is not inspect.Parameter.empty
        assert (documented is not None) == has_default, key
        if documented is not None and not callable(parameter.default):
            assert ast.literal_eval(documented[1]) == parameter.default


def test_importing_aida_imports_neither_the_catalog_nor_the_probe() -> None:
    code = "import sys, aida; print(*(m for m in sys.modules if m.startswith(('aida.', 'aida_lab'))))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    loaded = {name.split(".")[1] for name in shown.split()}
    assert loaded == {"_step", "_version", "backends", "optimizer", "rounding", "rule"}
