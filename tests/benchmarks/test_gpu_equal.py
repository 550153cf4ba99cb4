"""The share of equal outputs: both sides' counting, with vLLM's answers made up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "equal.py"
FAKE = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    sys.exit(0)  # asked whether it finds vLLM
job = json.load(open(sys.argv[2]))
assert [len(prompt) > 0 for prompt in job["prompts"]] == [True, True]
asked = job["speculation"]
parallel = asked and asked["parallel_drafting"]
count = job["max_tokens"]
found = [[1] * count, [2] * 3 + [4 if parallel else 2] * (count - 3)]
json.dump(found, open(sys.argv[3], "w"))
"""
pytestmark = pytest.mark.usefixtures("forked")


def test_both_sides_are_counted(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(FAKE.format(python=sys.executable))
    python.chmod(0o755)
    given = ["--limit", "2", "--max-tokens", "8", "--dtype", "float32"]
    given += ["--vllm-python", python, "--out", tmp_path / "equal.json"]
    command = [sys.executable, str(SCRIPT), *map(str, given)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["equal"]["peagle"] == {"peagle": 2, "eagle3": 2}  # guaranteed in float32
    assert shown["equal"]["vllm"] == {"peagle": 1, "eagle3": 2}
    written = json.loads((tmp_path / "equal.json").read_text())
    assert written["kept"]["vllm"] == {"peagle": [8, 3], "eagle3": [8, 8]}
    assert (written["equal"], written["k"], written["prompts"]) == (
        shown["equal"],
        7,
        {"bundled": 2},
    )
