"""Both servers on one machine, with ours in vLLM's place, too."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.pair import bundled
from records.store import read
from serve import pieces

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve.py"
FAKE = """#!/bin/sh
[ "$2 $3" = "vllm.entrypoints.cli.main serve" ] || exit 9
shift 3
exec {python} -m peagle serve "$@" --device cpu --max-num-seqs 2
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two prompts to cut pieces from."""
    place = tmp_path / "own.jsonl"
    texts = ["def add(a, b):\n    return a + b\n" * 60, "class Stack:\n    pass\n" * 60]
    place.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return place


def test_pieces_have_random_lengths_and_are_the_same_each_time(prompts: Path):
    found = pieces([prompts], 300, (400, 6000), 1)
    assert found == pieces([prompts], 300, (400, 6000), 1)
    assert found != pieces([prompts], 300, (400, 6000), 2)
    lengths = sorted(map(len, found))
    assert 0 < lengths[0] < lengths[-1] <= 6000
    assert 280 < lengths[150] < 520


def test_pieces_of_a_burst_begin_alike(prompts: Path):
    found = sorted(pieces([prompts], 20, (400, 2000), 1, shared=0.8), key=len)
    for shorter, longer in itertools.pairwise(found):
        assert longer.startswith(shorter[: int(0.75 * len(shorter))])
    assert len({text[int(0.8 * len(text)) :] for text in found}) > 15


def asked(prompts: Path, python: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    """What the script does with a pair of the bundled target's servers."""
    sizes = ["--requests", 4, "--max-tokens", 8, "--rounds", 1, "--concurrency", "1,2"]
    sizes += ["--burst", 3]
    given = [bundled("target"), "--prompts", prompts, *sizes, "--vllm-python", python, "--out", out]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *map(str, given)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.nightly
def test_both_servers_are_measured_in_one_report(prompts: Path, tmp_path: Path):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(FAKE.format(python=sys.executable))
    python.chmod(0o755)
    done = asked(prompts, python, out)
    assert done.returncode == 0, done.stderr
    runs = json.loads((out / "bench.json").read_text())["runs"]
    cases = [(run["method"], run["concurrency"]) for run in runs]
    assert sorted(cases) == [("peagle", 1), ("peagle", 2), ("vllm", 1), ("vllm", 2)]
    kept = read(out / "result.json")
    assert kept.versions["peagle"]["torch"]
    burst = [run for run in kept.runs if run.data == "burst"]
    assert [(run.side, run.concurrency, run.failed) for run in burst] == [
        ("peagle", 3, 0),
        ("vllm", 3, 0),
    ]
    for name, row in zip(("peagle", "vllm"), kept.rows, strict=True):
        wrote = [run for run in kept.runs if run.side == name and run.data == "prompts"]
        assert (row["side"], row["tokens"]) == (name, sum(run.output_tokens for run in wrote))
        assert row["processor_seconds"] > 0.05
        assert 0 < row["in_the_first_process"] <= row["microseconds_per_token"]
        assert row["start_seconds"] > 0.5
    assert "vllm" in (out / "report" / "index.html").read_text()


@pytest.mark.usefixtures("forked")
def test_a_server_that_does_not_start_is_told(prompts: Path, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such card\nexit 3\n")
    python.chmod(0o755)
    done = asked(prompts, python, tmp_path / "out")
    assert done.returncode == 1
    assert "vllm.entrypoints.cli.main serve" in done.stderr
    assert "--port did not start" in done.stderr
    assert "no such card" in done.stderr
