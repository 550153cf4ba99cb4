"""One wheel, installed in an environment of its own, works outside a checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LARGEST = 45e6
"""Bytes of the wheel, most of which are the bundled pair's weights."""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"

ALONE = """
import sys
sys.path.append(sys.argv.pop())
from peagle.__main__ import main
sys.exit(main())
"""
"""A program that finds what is in the directory of its last argument, and nothing else."""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what git would give, without what older builds left in the tree."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]):
        shutil.copy(ROOT / name, source)
    left = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=left)
    command = [sys.executable, "-c", BUILD, str(dist)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [built] = dist.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of an environment that has the wheel; what it depends on is this one's."""
    home = tmp_path_factory.mktemp("environment")
    python = home / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", f"--python={python}"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    [site] = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))

    def run(program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [str(home / "bin" / program), *arguments]
        return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)

    return run


def environment() -> dict[str, str]:
    """This process's, which says nothing of where modules are."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**alone, "OMP_NUM_THREADS": "1"}


def test_it_is_small_and_says_what_it_is(wheel: Path) -> None:
    assert wheel.name == f"peagle-{PROJECT['version']}-py3-none-any.whl"
    assert wheel.stat().st_size < LARGEST


def test_it_has_every_file_of_the_package(wheel: Path) -> None:
    there = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.*")}
    data = {name for name in there if not name.endswith((".py", ".pyc"))}
    assert not {name for name in data if ".egg-info" not in name} - set(ZipFile(wheel).namelist())


def test_there_is_one_version(installed: Run, tmp_path: Path) -> None:
    """That of pyproject.toml: the command says it, and the changelog begins with it."""
    done = installed("peagle", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["peagle", PROJECT["version"]])
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == PROJECT["version"]


def test_its_code_and_pair_are_the_environments_own(installed: Run, tmp_path: Path) -> None:
    source = (
        "import peagle; from peagle.pair import bundled; print(peagle.__file__, bundled('peagle'))"
    )
    done = installed("python", "-c", source, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(str(ROOT) not in place for place in done.stdout.split())


@pytest.mark.nightly
def test_the_demo_runs(installed: Run, tmp_path: Path) -> None:
    done = installed("peagle", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "P-EAGLE" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_missing_part_is_told_in_its_own_words(installed: Run, tmp_path: Path) -> None:
    """A wheel has no checkout: what to do about a missing library names the package."""
    code = installed("python", "-c", "import peagle; print(peagle.__file__)", cwd=tmp_path).stdout
    site = str(Path(code).parents[1])
    done = installed("python", "-S", "-c", ALONE, site, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "peagle: typer is not installed for this Python; pip install 'peagle[serve,structured]'\n"
    )
