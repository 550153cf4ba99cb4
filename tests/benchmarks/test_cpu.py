"""Engines that take turns with ours, with transformers itself and without vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from records.store import read

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu.py"


@pytest.mark.nightly
def test_all_sides_are_one_result_with_a_report(tmp_path: Path):
    prompts, out = tmp_path / "own.jsonl", tmp_path / "out"
    prompts.write_text(json.dumps({"prompt": "def add(a, b):\n"}) + "\n")
    given = ["--prompts", prompts, "--max-tokens", 6, "--rounds", 2, "--out", out]
    command = [sys.executable, str(SCRIPT), *map(str, given)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = read(out / "result.json")
    cases = [(run.side, run.method, run.k) for run in found.runs]
    ks = [(method, k) for method in ("eagle3", "peagle") for k in (3, 5, 7)]
    ours = [("peagle", "none", 0), *(("peagle", *each) for each in ks)]
    assert cases == [*ours, ("transformers", "none", 0)]
    assert all(len(run.rounds) == 2 and run.same_text for run in found.runs)
    assert found.versions["transformers"]["transformers"]
    assert found.setting["target"] != str(Path(found.setting["target"]).resolve())
    page = (out / "report" / "report.md").read_text()
    assert "| transformers |" in page
