"""The packages' own maps, in their `__init__`, name every module."""

import ast
import re
from pathlib import Path

import pytest

import peagle

ROOT = Path(peagle.__file__).parent
MAPPED = [
    *("bench", "cli", "dialects", "drafters", "engine", "engine/device", "engine/host"),
    *("engine_client", "models", "ops", "regenerate", "server", "train"),
]


@pytest.mark.parametrize("name", MAPPED)
def test_a_packages_map_names_all_that_is_in_it(name: str):
    folder = ROOT / name
    told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert modules | packages <= set(re.findall(r"\w+", told))
