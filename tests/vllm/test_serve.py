"""`peagle serve --engine vllm` on real vLLM: the bundled pair answers as it does here."""

import json
import urllib.request
from pathlib import Path

import pytest
from vllm_server import vllm_server

from peagle import LLM, EngineConfig, SamplingParams
from peagle.pair import bundled

pytestmark = pytest.mark.vllm
PROMPT, TOKENS = "def fibonacci(n):\n", 32


def test_vllm_serves_the_bundled_pair(tmp_path: Path):
    with vllm_server(tmp_path) as url:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        asked = f"{url}/v1/completions"
        request = urllib.request.Request(asked, json.dumps(body).encode(), headers)
        text = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["text"]
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    llm = LLM(bundled("target"), None, EngineConfig(dtype="float32"))
    [wanted] = llm.generate([PROMPT], SamplingParams(max_tokens=TOKENS))
    assert text == wanted.text
    drafted = [
        line
        for line in metrics.splitlines()
        if line.startswith("vllm:spec_decode_num_draft_tokens_total")
    ]
    assert any(float(line.split()[-1]) > 0 for line in drafted)
