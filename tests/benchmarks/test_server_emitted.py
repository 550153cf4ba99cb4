"""What a token costs on the host, on a few tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "server" / "emitted.py"
pytestmark = pytest.mark.usefixtures("forked")


def test_a_row_for_each_case_and_side(tmp_path: Path):
    given = ["--requests", "2", "--length", "9", "--pause", "1", "--rounds", "1"]
    command = [sys.executable, str(SCRIPT), *given, "--out", str(tmp_path / "found.json")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["requests"], found["tokens"], found["length"]) == (2, 3, 9)
    sides = [(row["case"], row["side"]) for row in found["rows"]]
    offline = [(case, side) for case in ("text", "stops", "chat") for side in ("llm", "async")]
    assert sides == [*offline, ("chat", "http"), ("chat", "late")]
    for row in found["rows"]:
        assert row["microseconds"] > 0
        assert row["tokens_per_second"] > 0
