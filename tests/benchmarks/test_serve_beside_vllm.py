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
    sizes += ["--burst", 3, "--chats", "2:2", "--cache-bytes", 1 << 24, "--beside", "none,chains"]
    speculation = {"model": str(bundled("peagle")), "method": "eagle3", "parallel_drafting": True}
    sizes += ["--speculative-config", json.dumps({**speculation, "num_speculative_tokens": 3})]
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
    servers = ["peagle", "peagle-chains", "peagle-none", "vllm", "vllm-none"]
    assert sorted(cases) == [(name, at_once) for name in servers for at_once in (1, 2)]
    kept = read(out / "result.json")
    assert kept.versions["peagle"]["torch"]
    started = {
        "peagle": ("peagle", "", "peagle", "auto"),
        "vllm": ("vllm", "", "peagle", "fixed"),
        "peagle-none": ("peagle", "", "none", "fixed"),
        "vllm-none": ("vllm", "", "none", "fixed"),
        "peagle-chains": ("peagle", "chains", "peagle", "auto"),
    }
    told: dict[str, list[tuple[str, int, int]]] = {name: [] for name in started}
    tokens = dict.fromkeys(started, 0)
    for run in kept.runs:
        how = (run.side, run.setting, run.method, run.draft_length)
        name = next(name for name, case in started.items() if case == how)
        told[name].append((run.data, run.concurrency, run.failed))
        tokens[name] += run.output_tokens if run.data != "burst" else 0
    loads = [("prompts", 1, 0), ("prompts", 2, 0), ("own", 2, 0), ("burst", 3, 0)]
    assert told == dict.fromkeys(started, loads)
    for name, row in zip(started, kept.rows, strict=True):
        assert (row["side"], row["tokens"]) == (name, tokens[name])
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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--chats", "8"], "--chats takes C:N, and a comma before the next, not 8"),
        (["--beside", "trees"], "--beside takes none, chains, not trees"),
        (["--beside", "none"], "--beside is for servers beside those of --speculative-config"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_bad_loads_are_told_before_a_server_starts(
    prompts: Path, tmp_path: Path, given: list[str], told: str
):
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), str(bundled("target")), "--prompts", str(prompts)]
    done = subprocess.run(
        [*command, "--out", str(out), *given], capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert told in done.stderr
    assert not out.exists()
