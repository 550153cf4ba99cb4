"""Every command and Python block that README.md and docs/ print works as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, content) of every fenced block of a language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page.name, found) for page in PAGES for found in pattern.findall(page.read_text())]


def commands() -> list[tuple[str, str]]:
    lines = [(page, line) for page, block in blocks("bash") for line in block.splitlines()]
    return [(page, line.split("  #")[0].strip()) for page, line in lines if line.strip()]


@pytest.mark.parametrize(("page", "command"), commands())
def test_command(page: str, command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        dry = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert dry.returncode == 0, f"{page}: {dry.stderr}"
        return
    assert program == "peagle", f"{page}: {command}"
    done = run("-m", "peagle.cli", *arguments, cwd=tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"
    assert done.stdout.strip()


@pytest.mark.parametrize(("page", "source"), blocks("python"))
def test_python_block(page: str, source: str, tmp_path: Path) -> None:
    done = run("-c", source, cwd=tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    # two threads that wait for each other on busy cores take minutes
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_recipe_keys_in_the_training_page_exist() -> None:
    from peagle.train.recipe import Recipe

    [(_, recipe)] = [block for block in blocks("yaml") if block[0] == "train.md"]
    keys = {line.split(":")[0] for line in recipe.splitlines()}
    assert keys <= Recipe.model_fields.keys()
