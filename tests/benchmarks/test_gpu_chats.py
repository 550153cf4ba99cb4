import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "chats.py"
pytestmark = pytest.mark.usefixtures("forked")


def test_chats_with_and_without_tools_have_their_rows(tmp_path: Path):
    out = tmp_path / "chats.json"
    flags = ["--shape", "tiny", "--concurrency", "1,2", "--max-tokens", "6", "--rounds", "2"]
    command = [sys.executable, str(SCRIPT), *flags, "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["requests"], row["way"]) for row in rows] == [
        (level, way) for level in (1, 2) for way in ("no tools", "tools, auto")
    ]
    assert all(len(row["rounds"]) == 2 and row["tokens_per_second"] > 0 for row in rows)
