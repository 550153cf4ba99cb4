"""A source tree without an installation, or with a part of one."""

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import peagle
from peagle.errors import InputError
from peagle.installation import installed_version
from peagle.pair import bundled

SOURCE = Path(peagle.__file__).parents[1]
CURE = "is not installed for this Python; in peagle's checkout: pip install '.[serve,structured]'"


def run(*places: Path, then: str = "--version") -> subprocess.CompletedProcess[str]:
    """`python -m peagle` with these places alone, besides Python's own."""
    environment = {"PYTHONPATH": ":".join(map(str, places))}
    command = [sys.executable, "-S", "-m", "peagle", then]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")


def test_it_says_in_a_line_what_to_do(tmp_path: Path):
    """Where nothing beside the code holds metadata, as an editable installation leaves it there."""
    (tmp_path / "peagle").symlink_to(SOURCE / "peagle")
    done = run(tmp_path, then="demo")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"peagle: peagle {CURE}")


def test_a_missing_dependency_is_named(tmp_path: Path):
    metadata = Path(str(distribution("peagle")._path))  # type: ignore[attr-defined]
    shutil.copytree(metadata, tmp_path / metadata.name)
    done = run(SOURCE, tmp_path, then="demo")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"peagle: typer {CURE}")


def test_metadata_beside_the_code_is_enough(tmp_path: Path):
    metadata = Path(str(distribution("peagle")._path))  # type: ignore[attr-defined]
    shutil.copytree(metadata, tmp_path / metadata.name)
    libraries = Path(distribution("typer").locate_file(""))  # type: ignore[arg-type]
    done = run(SOURCE, tmp_path, libraries)
    assert (done.returncode, done.stdout.split()[0]) == (0, "peagle"), done.stderr


def test_what_records_the_version_says_so_too(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> str:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("peagle.installation.version", absent)
    with pytest.raises(InputError, match="peagle is not installed for this Python"):
        installed_version()


def test_the_bundled_pair_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.pair.PLACE", tmp_path)
    (tmp_path / "peagle").mkdir()
    (tmp_path / "peagle" / "config.json").write_text("{}")
    assert bundled("peagle") == tmp_path / "peagle"
    with pytest.raises(InputError, match=r"lacks the bundled target .*recipes/demo"):
        bundled("target")
