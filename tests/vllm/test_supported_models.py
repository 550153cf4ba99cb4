"""The table of targets that vLLM runs with a drafter, against the source in vLLM's own wheel.

Nothing of it is imported, so the wheel for GPUs will do; `make test-vllm` downloads it.
"""

import ast
import os
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from peagle.models.families import FAMILIES
from peagle.models.vllm_support import SUPPORTED

pytestmark = pytest.mark.vllm
WHEELS = Path(os.environ.get("PEAGLE_VLLM_WHEELS", ".venv-vllm/wheels"))
PACKAGE = "vllm.model_executor.models"
TARGETS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
"""Parts of the registry that hold targets."""


class Source:
    """The modules of a wheel, unimported."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = zipfile.ZipFile(wheel)
        self._files = set(self._wheel.namelist())

    def registry(self) -> Iterator[tuple[str, str, str]]:
        """Each target's architecture, and the module and name of its class."""
        for node in self.tree(f"{PACKAGE}.registry").body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in TARGETS:
                for architecture, (module, name) in ast.literal_eval(node.value).items():
                    inside = module if module.startswith("vllm.") else f"{PACKAGE}.{module}"
                    yield architecture, inside, name

    @cache  # noqa: B019 (there is one)
    def tree(self, module: str) -> ast.Module:
        """A module's source; an empty one where the wheel has none."""
        file = self._file(module)
        return ast.parse(self._wheel.read(file) if file in self._files else "")

    def _file(self, module: str) -> str:
        path = module.replace(".", "/")
        return f"{path}.py" if f"{path}.py" in self._files else f"{path}/__init__.py"

    def derives(self, module: str, name: str, base: str) -> bool:
        """Whether a class is `base`, by name, or is derived from it, through any modules."""
        if name == base:
            return True
        nodes = list(ast.walk(self.tree(module)))
        for node in nodes:
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases = [ast.unparse(each).partition("[")[0] for each in node.bases]
                return any(self.derives(module, each, base) for each in bases)
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.derives(self._origin(module, node), alias.name, base)
        return False

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """The module from which something is imported."""
        above = module.split(".")
        if self._file(module).endswith("__init__.py"):
            above.append("")  # a package is a module of its own folder
        start = above[: len(above) - node.level] if node.level else []
        return ".".join([*start, *([node.module] if node.module else [])])


def test_the_table_is_that_of_the_wheel():
    [wheel] = WHEELS.glob("vllm-0.33.0-*.whl")
    source = Source(wheel)
    drafted = {
        architecture
        for architecture, module, name in source.registry()
        if source.derives(module, name, "SupportsEagle3")
    }
    assert drafted - set(FAMILIES) == SUPPORTED
