"""The share of equal outputs: both sides' counting, with vLLM's answers made up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from records.store import read

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "equal.py"
FAKE = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    sys.exit(0)  # asked whether it finds vLLM
assert sys.argv[1:3] == ["-m", "peers.vllm_side"]
job = json.load(open(sys.argv[3]))
assert [len(prompt) > 0 for prompt in job["prompts"]] == [True, True]
assert (job["drafter"] is None) == (job["method"] == "none")
count = job["max_tokens"]
found = [[1] * count, [2] * 3 + [4 if job["method"] == "peagle" else 2] * (count - 3)]
json.dump(found, open(sys.argv[4], "w"))
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
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    equal = {(row["who"], row["method"]): row["equal"] for row in told}
    ours = {("peagle", "eagle3"): 2, ("peagle", "peagle"): 2}  # guaranteed in float32
    assert equal == ours | {("vllm", "eagle3"): 2, ("vllm", "peagle"): 1}
    written = read(tmp_path / "equal.json")
    assert [row["kept"] for row in written.rows[2:]] == [(8.0, 8.0), (8.0, 3.0)]
    assert (written.setting["k"], written.setting["prompts"]) == (7, {"bundled": 2})
    assert written.units == {"equal": "outputs", "kept": "tokens"}
