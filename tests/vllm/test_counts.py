"""Invariant 4: a drafter gives the same drafts here and in vLLM, count for count.

Drafters are trained only partly: one that accepts nothing, or everything, would hide a wrong mask,
position or vocabulary.
"""

import json
import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MASK, VOCAB, save_target

from peagle.config import EngineConfig, SamplingParams
from peagle.drafters.checkpoint import load_drafter
from peagle.drafters.eagle3 import SequentialDrafter
from peagle.drafters.peagle import ParallelDrafter
from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.models.families import load_decoder
from peagle.train.recipe import Recipe
from peagle.train.run import prepare

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
"""vLLM's CPU attention has no heads smaller than 32 on every machine."""
TOKENS = 48


@dataclass(frozen=True)
class Case:
    target: str
    method: str
    qk_norm: bool
    draft_vocab_size: int
    layers: int
    k: int


CASES = [
    Case("qwen3", "peagle", qk_norm=True, draft_vocab_size=VOCAB, layers=2, k=3),
    Case("qwen3", "peagle", qk_norm=False, draft_vocab_size=64, layers=4, k=5),
    Case("llama", "peagle", qk_norm=False, draft_vocab_size=VOCAB, layers=2, k=7),
    Case("qwen3", "eagle3", qk_norm=True, draft_vocab_size=64, layers=1, k=5),
    Case("llama", "eagle3", qk_norm=False, draft_vocab_size=VOCAB, layers=1, k=3),
]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("PEAGLE_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
    assert Path(python).exists(), f"{python} is missing; run these tests by `make test-vllm`"
    return python


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}-{case.target}-k{case.k}")
def test_counts_equal_vllms(case: Case, vllm_python: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", case.target, layer_std=0.08, **HEADS)
    drafter = partly_trained(case, target, tmp_path)
    batches = [prompts(5)[:1], prompts(5)[1:]]
    theirs = run_vllm(vllm_python, tmp_path, case, target, drafter, batches)
    ours = [request for batch in batches for request in run(case, target, drafter, batch)]

    assert [request.output for request in ours] == theirs["outputs"]
    counts = [request.speculation for request in ours]
    per_position = [sum(p) for p in zip(*(c.accepted_per_position for c in counts), strict=True)]
    assert per_position == theirs["accepted_per_position"]
    assert sum(count.cycles for count in counts) == theirs["cycles"]
    assert sum(count.drafted for count in counts) == theirs["drafted"]
    assert sum(count.accepted for count in counts) == theirs["accepted"]
    assert 0 < sum(per_position) < theirs["drafted"], "this drafter would hide a mistake"


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(1, MASK) for _ in range(draw.randrange(4, 40))] for _ in range(count)]


def partly_trained(case: Case, target: Path, place: Path) -> Path:
    """A drafter trained for a few seconds on the target's own greedy text."""
    data = place / "data.jsonl"
    requests = run(None, target, None, [*prompts(5), *(p[:3] for p in prompts(40))])
    lines = [
        {"prompt_token_ids": r.tokens[: r.prompt_length], "token_ids": r.output}
        for r in requests
        if MASK not in r.tokens
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = Recipe(
        target=str(target),
        data=(str(data),),
        output=str(place / "drafter"),
        method=case.method,
        mask_token_id=MASK if case.method == "peagle" else None,
        taps=(1, 2, 3),
        qk_norm=case.qk_norm,
        draft_vocab_size=case.draft_vocab_size,
        num_hidden_layers=case.layers,
        num_speculative_tokens=case.k,
        row_length=128,
        rows_per_step=4,
        steps=40,
        warmup_steps=5,
        evaluate_every=40,
        learning_rate=3e-3,
        validation_documents=4,
        device="cpu",
    )
    prepare(recipe).run(lambda report: None)
    return place / "drafter"


def run(
    case: Case | None, target: Path, drafter: Path | None, batch: list[list[int]]
) -> list[Request]:
    """Our engine, greedy, in float32."""
    decoder = load_decoder(target, torch.float32, torch.device("cpu"))
    config = EngineConfig(max_model_len=256, kv_cache_memory=1 << 26, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    if case is None or drafter is None:
        engine = Engine(decoder, None, 0, config)
    else:
        model = load_drafter(drafter, decoder)
        kind = ParallelDrafter if case.method == "peagle" else SequentialDrafter
        engine = Engine(decoder, kind(model), case.k, config)
    requests = [engine.add(str(i), prompt, params) for i, prompt in enumerate(batch)]
    while engine.busy:
        engine.step()
    return requests


def run_vllm(
    python: str, place: Path, case: Case, target: Path, drafter: Path, batches: list[Any]
) -> dict[str, Any]:
    job, result = place / "job.json", place / "result.json"
    parallel = case.method == "peagle"
    facts = {"target": str(target), "drafter": str(drafter), "parallel": parallel, "k": case.k}
    job.write_text(json.dumps({**facts, "max_tokens": TOKENS, "batches": batches}))
    side = Path(__file__).with_name("engine_side.py")
    done = subprocess.run(
        [python, str(side), str(job), str(result)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())
