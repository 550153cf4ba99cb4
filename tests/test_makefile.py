"""`make demo` from nothing says what it does; with a Python that makes an environment of stubs."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STUB = """#!/bin/sh
if [ "$1" = -c ]; then exec {real} -c "import sys; sys.version_info = {version}
$2"; fi
# {python} -m venv DIRECTORY
mkdir -p "$3/bin"
printf '#!/bin/sh\\nexit {pip}\\n' > "$3/bin/pip"
printf '#!/bin/sh\\necho the demo runs\\n' > "$3/bin/peagle"
chmod +x "$3/bin/pip" "$3/bin/peagle"
"""


@pytest.fixture
def make(tmp_path):
    """Runs `make demo` in a directory without an environment.

    pip: its exit code; version: Python's.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def run(pip=0, version=(3, 11, 0)):
        python = tmp_path / "python"
        told = {"python": python, "real": sys.executable, "version": version, "pip": pip}
        python.write_text(STUB.format(**told))
        python.chmod(0o755)
        command = ["make", "demo", f"PYTHON={python}"]
        # under `make test` this is a make of its own, not a part of that one
        alone = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        return subprocess.run(
            command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
        )

    return run


def test_every_stage_of_the_set_up_is_a_line_and_is_timed(make):
    lines = make().stdout.splitlines()
    stages = [line.split(" ... ") for line in lines[1:-1]]
    assert lines[0].startswith("setting up .venv, 2.7 GB")
    assert [what.split()[0] for what, _ in stages] == ["Python", "torch", "peagle"]
    assert all(took.removesuffix(" s").isdigit() for _, took in stages)
    assert lines[-1] == "the demo runs"
    assert make().stdout == "the demo runs\n"  # set up once


def test_a_stage_that_fails_ends_it_and_is_tried_again(make):
    failed = make(pip=3)
    assert failed.returncode != 0
    assert failed.stdout.splitlines()[-1].endswith("torch (0.8 GB) ... ")
    assert make().stdout.endswith("the demo runs\n")


def test_a_python_that_is_too_old_ends_it_before_anything_is_downloaded(make, tmp_path):
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert oldest == ">=3.11"
    old = make(version=(3, 10, 12))
    assert (old.returncode, old.stdout) == (2, "")
    told, _ = old.stderr.splitlines()  # the second is make's
    assert told == (
        f"peagle needs Python 3.11 or newer; {tmp_path / 'python'} is 3.10: name one, as in make "
        "PYTHON=python3.12"
    )
    assert not (tmp_path / ".venv").exists()
