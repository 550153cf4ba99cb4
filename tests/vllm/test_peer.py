"""The module that runs vLLM's side of `benchmarks/`, with real vLLM (`make test-vllm`)."""

import json
import os
import sys
from pathlib import Path

import pytest
from plain_drafter import plain_drafter

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from peagle import LLM, EngineConfig, SamplingParams  # noqa: E402
from peagle.pair import bundled  # noqa: E402
from peers.job import Job  # noqa: E402
from peers.processes import Vllm, run  # noqa: E402

pytestmark = pytest.mark.vllm
PYTHON = Path(os.environ.get("PEAGLE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
PROMPTS, TOKENS, SECONDS = [[5, 6, 7, 8], [9, 10, 11]], 12, 600
EAGER = {"enforce_eager": True, "max_model_len": 256}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    openmp = PYTHON.parents[1] / "lib" / "libiomp5.so"
    if openmp.exists():
        monkeypatch.setenv("LD_PRELOAD", str(openmp))
    return Vllm(PYTHON)


def job(method: str, k: int, drafter: str | None = None, **more: object) -> Job:
    target = str(bundled("target"))
    sizes = {"max_num_seqs": 2, "max_tokens": TOKENS, "memory_share": 0.5, "engine_args": EAGER}
    return Job(method, k, "float32", checkpoint=target, drafter=drafter, **{**sizes, **more})


@pytest.mark.parametrize(("method", "k"), [("none", 0), ("peagle", 3)])
def test_outputs_are_those_of_our_engine(vllm: Vllm, method: str, k: int, tmp_path: Path):
    drafter = str(plain_drafter(method, tmp_path)) if k else None
    found = vllm.outputs(job(method, k, drafter, prompts=PROMPTS), SECONDS)
    ours = LLM(bundled("target"), config=EngineConfig(dtype="float32"))
    how = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    assert found == [list(done.token_ids) for done in ours.generate(PROMPTS, how)]


def test_speeds_come_with_what_vllm_made_of_its_arguments(vllm: Vllm, tmp_path: Path):
    load = {"concurrencies": (1, 2), "rounds": 2, "prompt_tokens": 8, "warm_up_tokens": 4}
    asked = job("none", 0, shape="tiny", **load)
    command, result = vllm.command(asked, tmp_path)
    ended = run(command, vllm.environment(), SECONDS)
    assert ended.failure is None
    told = json.loads(result.read_text())
    assert [(one["concurrency"], len(one["rounds"])) for one in told["runs"]] == [(1, 2), (2, 2)]
    assert all(speed > 0 for one in told["runs"] for speed in one["rounds"])
    assert told["environment"]["versions"]["vllm"]
    assert told["environment"]["resolved"]["prefix_caching"] is False
