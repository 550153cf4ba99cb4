"""First tokens of every kind of prompt, on a shape that a CPU runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "first_token.py"
pytestmark = pytest.mark.usefixtures("forked")


def test_a_row_for_each_length_and_cached_prefix(tmp_path: Path):
    given = ["--shape", "tiny", "--lengths", "8,200", "--cached", "0,64", "--rounds", "3"]
    command = [sys.executable, str(SCRIPT), *given, "--out", str(tmp_path / "found.json")]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["shape"], found["method"]) == ("tiny", "peagle")
    kinds = [(row["cached"], row["new"]) for row in found["rows"]]
    assert kinds == [(0, 8), (0, 200), (64, 8), (64, 200)]
    assert all(row["milliseconds"] > 0 for row in found["rows"])
    assert [json.loads(line) for line in done.stdout.splitlines()] == found["rows"]
