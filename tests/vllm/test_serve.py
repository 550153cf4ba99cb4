"""`peagle serve --engine vllm` on real vLLM: the bundled pair answers as it does here."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from peagle import LLM, EngineConfig, SamplingParams
from peagle.pair import bundled

pytestmark = pytest.mark.vllm
PYTHON = Path(os.environ.get("PEAGLE_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
PROMPT, TOKENS, START_SECONDS = "def fibonacci(n):\n", 32, 300
FLAGS = ["--max-model-len", "256", "--max-num-seqs", "2", "--served-model-name", "demo"]
VLLMS_OWN = ["--enforce-eager", "--dtype", "float32"]


def test_vllm_serves_the_bundled_pair(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    openmp = PYTHON.parents[1] / "lib" / "libiomp5.so"
    environment = os.environ | {
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
        "PYTHONPATH": str(name_package(tmp_path)),
    }
    place = [str(bundled("target")), "--port", str(port)]
    config = {
        "method": "eagle3",
        "model": str(bundled("peagle")),
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    command = [sys.executable, "-m", "peagle", "serve", *place, "--engine", "vllm"]
    command += ["--speculative-config", json.dumps(config), *FLAGS, *VLLMS_OWN]
    log = tmp_path / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        text = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["text"]
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    finally:
        process.terminate()
        process.wait(60)
    llm = LLM(bundled("target"), None, EngineConfig(dtype="float32"))
    [wanted] = llm.generate([PROMPT], SamplingParams(max_tokens=TOKENS))
    assert text == wanted.text
    drafted = [
        line
        for line in metrics.splitlines()
        if line.startswith("vllm:spec_decode_num_draft_tokens_total")
    ]
    assert any(float(line.split()[-1]) > 0 for line in drafted)


def name_package(place: Path) -> Path:
    """The build for CPUs is called vllm-cpu, and its own command asks for the version of vllm."""
    metadata = place / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return place


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers; what it printed when it does not."""
    end = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(1)
