"""Random lengths on both sides, with vLLM's figures made up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mixed import LEAST, Mix, main

from peagle.errors import InputError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "mixed.py"
FAKE = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    sys.exit(0)  # asked whether it finds vLLM
job = json.load(open(sys.argv[2]))
assert job["max_num_seqs"] == 2 and job["max_model_len"] >= 60
lists = job["lists"]
assert [len(asked) for asked in lists] == [5, 5, 5]
assert all(len(prompt) <= 40 and count <= 20 for asked in lists for prompt, count in asked)
json.dump([100.0, 200.0], open(sys.argv[3], "w"))
"""
pytestmark = pytest.mark.usefixtures("forked")


def test_lengths_are_drawn_around_their_median_and_the_same_each_time():
    mix = Mix(400, 8, (100, 500), (50, 200), 2)
    lists = mix.lists(1000)
    assert lists == mix.lists(1000)
    assert len(lists) == 3
    assert lists[1] != lists[2]
    for place, (median, most) in enumerate((mix.prompt_tokens, mix.output_tokens)):
        lengths = sorted(len(a[0]) if place == 0 else a[1] for a in lists[1])
        assert LEAST <= lengths[0] < lengths[-1] == most
        assert 0.8 * median < lengths[200] < 1.2 * median


def test_both_sides_run_the_lists(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(FAKE.format(python=sys.executable))
    python.chmod(0o755)
    sizes = ["--requests", 5, "--in-flight", 2, "--prompts", "20,40", "--outputs", "10,20"]
    given = ["tiny:peagle:2:1.5", *sizes, "--rounds", 2, "--dtype", "float32"]
    given += ["--vllm-python", python, "--out", tmp_path / "mixed.json"]
    command = [sys.executable, str(SCRIPT), *map(str, given)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "mixed.json").read_text())
    assert found["vllm"] == {"captured": None, "otps": [100.0, 200.0]}
    for kind in ("fixed", "auto"):
        assert all(speed > 0 for speed in found[kind]["otps"])
        assert len(found[kind]["otps"]) == len(found[kind]["ttft_ms"]) == 2
    assert json.loads(done.stdout.splitlines()[-1]).keys() == {"fixed", "auto"}


def test_wrong_lengths_are_refused():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "tiny:none", "--prompts", "20"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "a median and a maximum" in done.stderr


def test_dummy_weights_are_not_compared_with_packed_ones():
    with pytest.raises(InputError, match="both sides have to read them: give --checkpoint"):
        main("gpt-oss-20b:none")
