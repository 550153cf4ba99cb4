"""`peagle bench --url` measures our server and real vLLM with one pair, and makes one report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_server import K, our_server, vllm_server

pytestmark = pytest.mark.vllm
PROMPTS, TOKENS, ROUNDS = 3, 48, 2


def test_two_servers_of_one_pair_in_one_report(tmp_path: Path):
    result, report = tmp_path / "result.json", tmp_path / "report"
    with our_server(tmp_path) as ours, vllm_server(tmp_path) as theirs:
        servers = ["--url", f"peagle={ours}", "--url", f"vllm={theirs}"]
        size = ["--limit", PROMPTS, "--max-tokens", TOKENS, "--rounds", ROUNDS]
        command = ["bench", *servers, *size, "--concurrency", "1,2"]
        command += ["--json", result, "--report", report]
        done = subprocess.run(
            [sys.executable, "-m", "peagle", *map(str, command)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    written = json.loads(result.read_text())
    names = [(server["name"], server["model"]) for server in written["environment"]["servers"]]
    assert names == [("peagle", "demo"), ("vllm", "demo")]
    runs = {(run["method"], run["concurrency"]): run for run in written["runs"]}
    assert len(runs) == 4
    for run in runs.values():
        assert len(run["rounds"]) == ROUNDS
        assert run["failed"] == 0
        assert run["same_text"]
        assert 0 < run["ttft_ms"]["p50"] < run["e2e_ms"]["p50"]
        assert len(run["acceptance_rate_per_position"]) == K
    ours_alone, theirs_alone = runs["peagle", 1], runs["vllm", 1]
    assert ours_alone["output_tokens"] == theirs_alone["output_tokens"]
    length = ours_alone["acceptance_length"]
    assert theirs_alone["acceptance_length"] == pytest.approx(length, rel=0.05)
    page = (report / "index.html").read_text()
    assert all(f'<th class="text">{name}</th>' in page for name in ("peagle", "vllm"))
