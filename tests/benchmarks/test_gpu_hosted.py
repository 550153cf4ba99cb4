import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "hosted.py"
pytestmark = pytest.mark.usefixtures("forked")


def test_every_way_has_its_row(tmp_path: Path):
    out = tmp_path / "hosted.json"
    flags = ["--shape", "tiny", "--concurrency", "1,2", "--max-tokens", "6", "--rounds", "1"]
    command = [sys.executable, str(SCRIPT), *flags, "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["shape"], result["max_tokens"]) == ("tiny", 6)
    kinds = [(row["requests"], row["way"], row["one_in"]) for row in result["rows"]]
    assert len(kinds) == len(set(kinds)) == 6 + 6 + 4
    assert (2, "grammar", 8) in kinds
    assert all(row["tokens_per_second"] > 0 < row["step_ms"] for row in result["rows"])
