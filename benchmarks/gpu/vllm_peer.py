"""vLLM's side, in vLLM's own environment: `vllm_peer.py JOB.json RESULT.json`.

A target from the job's checkpoint, else with vLLM's dummy weights in a shape's sizes, and a drafter
of ours in vLLM's layout. The result file is written after every number of requests, so a later
failure leaves the earlier ones.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from config_json import config_json

from peagle.bench.shapes import random_drafter, random_prompts, shape_of
from peagle.drafters.checkpoint import save_drafter

MEMORY_SHARE = 0.9
"""Ours too, by default."""
Job = dict[str, Any]


def main(job_file: str, result_file: str) -> None:
    """Run a job."""
    job = json.loads(Path(job_file).read_text())
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        llm = open_llm(job, Path(scratch))
        environment = {"versions": versions(), "start_seconds": time.perf_counter() - start}
        runs: list[dict[str, Any]] = []
        for concurrency in job["concurrencies"]:
            runs.append(run_case(llm, job, concurrency))
            print(runs[-1], flush=True)
            Path(result_file).write_text(json.dumps({"environment": environment, "runs": runs}))


def open_llm(job: Job, directory: Path) -> Any:
    """vLLM with a job's shape and method."""
    import vllm

    captured, backend = job["captured"], job["moe_backend"]
    return vllm.LLM(
        job["checkpoint"] or str(described(job, directory / "target")),
        load_format="auto" if job["checkpoint"] else "dummy",
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"],
        gpu_memory_utilization=MEMORY_SHARE,
        enable_prefix_caching=False,
        speculative_config=speculation(job, directory / "drafter") if job["k"] else None,
        compilation_config={"max_cudagraph_capture_size": captured} if captured else None,
        **({"moe_backend": backend} if backend else {}),
    )


def described(job: Job, directory: Path) -> Path:
    """A directory with the configuration alone, for dummy weights."""
    directory.mkdir()
    config = config_json(shape_of(job["shape"]).target, job["dtype"])
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def speculation(job: Job, directory: Path) -> dict[str, Any]:
    """Write the drafter; returns vLLM's settings for it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parallel, dtype = job["method"] == "peagle", getattr(torch, job["dtype"])
    shape = shape_of(job["shape"])
    save_drafter(
        directory, random_drafter(shape, parallel, job["layers"], device, dtype).model, dtype
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "method": "eagle3",
        "model": str(directory),
        "num_speculative_tokens": job["k"],
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": job["acceptance_rates"],
        "draft_load_config": {"load_format": "safetensors"},
        **({"parallel_drafting": True} if parallel else {}),
    }


def run_case(llm: Any, job: Job, concurrency: int) -> dict[str, Any]:
    """Output tokens per second of each round with `concurrency` requests, after a warm-up.

    The warm-up is a short and a whole round: some of vLLM's kernels are tuned at their first use.
    """
    vocab_size = shape_of(job["shape"]).target.vocab_size
    prompts = random_prompts(concurrency, job["prompt_tokens"], vocab_size)
    asked = [(prompt, job["max_tokens"]) for prompt in prompts]
    generate(llm, [(prompt, job["warm_up_tokens"]) for prompt in prompts])
    generate(llm, asked)
    rounds = []
    for _ in range(job["rounds"]):
        start = time.perf_counter()
        tokens = generate(llm, asked)
        rounds.append(tokens / (time.perf_counter() - start))
    return {"concurrency": concurrency, "otps": statistics.median(rounds), "rounds": rounds}


def generate(llm: Any, asked: Sequence[tuple[list[int], int]]) -> int:
    """Complete each prompt greedily by its number of tokens; returns their sum."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for _, count in asked
    ]
    requests = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    done = llm.generate(requests, params, use_tqdm=False)
    tokens = sum(len(request.outputs[0].token_ids) for request in done)
    assert tokens == sum(count for _, count in asked), f"{tokens} tokens came out"
    return tokens


def versions() -> dict[str, str]:
    """Versions of vLLM and torch."""
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    main(*sys.argv[1:])
