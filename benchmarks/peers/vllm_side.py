"""vLLM's side, in vLLM's own environment: `python -m peers.vllm_side JOB.json RESULT.json`.

A target from the job's checkpoint, else with vLLM's dummy weights in a shape's sizes, and a drafter
of ours in vLLM's layout. The result is a list of outputs where the job has prompts; else it is the
environment with the speeds, written after every number of requests, so that a later failure leaves
the earlier ones. It runs vLLM 0.26 and 0.33.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from peagle.bench.random_weights import random_ends
from peagle.bench.shapes import random_block, random_drafter, random_prompts, shape_of
from peagle.drafters.checkpoint import EMBEDDINGS, HEAD, save_drafter
from peagle.drafters.dflash import BlockModel
from peagle.drafters.dflash_checkpoint import save_dflash
from peagle.drafters.model import DraftModel
from peers.config_json import config_json
from peers.job import Gate, Job

Asked = tuple[Sequence[int], int]
"""A prompt, and the number of its output tokens."""


def main(job_file: str, result_file: str) -> None:
    """Run a job."""
    job, result = Job.read(Path(job_file)), Path(result_file)
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        llm = open_llm(job, Path(scratch))
        about = {
            "versions": versions(),
            "start_seconds": time.perf_counter() - start,
            "resolved": resolved(llm),
        }
        print(about, flush=True)
        if job.prompts:
            asked = [(prompt, job.max_tokens) for prompt in job.prompts]
            result.write_text(json.dumps(complete(llm, asked)))
            return
        if job.gate:
            Gate(Path(job.gate)).wait()
        runs: list[dict[str, Any]] = []
        for concurrency in job.concurrencies:
            runs.append({"concurrency": concurrency, "rounds": speeds(llm, job, concurrency)})
            print(runs[-1], flush=True)
            result.write_text(json.dumps({"environment": about, "runs": runs}))


def open_llm(job: Job, directory: Path) -> Any:
    """vLLM with a job's models and method."""
    import vllm

    target = job.checkpoint or str(described(job, directory / "target"))
    settings = {
        "load_format": "auto" if job.checkpoint else "dummy",
        "dtype": job.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": job.max_model_len,
        "max_num_seqs": job.max_num_seqs,
        "gpu_memory_utilization": job.memory_share,
        "enable_prefix_caching": False,
        "speculative_config": speculation(job, directory / "drafter") if job.k else None,
    }
    if job.captured:
        settings["compilation_config"] = {"max_cudagraph_capture_size": job.captured}
    if job.moe_backend:
        settings["moe_backend"] = job.moe_backend
    return vllm.LLM(target, **{**settings, **job.engine_args})


def described(job: Job, directory: Path) -> Path:
    """A directory with the configuration alone, for dummy weights."""
    directory.mkdir()
    config = config_json(shape_of(str(job.shape)).target, job.dtype)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def speculation(job: Job, directory: Path) -> dict[str, Any]:
    """vLLM's settings for the job's drafter, which is written where the job names none."""
    parallel = job.method == "peagle"
    rates = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [*job.acceptance_rates],
    }
    asked = {"num_speculative_tokens": job.k, **(rates if job.acceptance_rates else {})}
    if job.method == "mtp":  # the head among the target's own files
        return {"method": "mtp", **asked}
    if job.drafter is None:
        write_drafter(job, directory)
    return {
        "method": "dflash" if job.method == "dflash" else "eagle3",
        "model": job.drafter or str(directory),
        "draft_load_config": {"load_format": "safetensors"},
        **asked,
        **({"parallel_drafting": True} if parallel else {}),
    }


def write_drafter(job: Job, directory: Path) -> None:
    """Write a random drafter of the job's shape."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, shape = getattr(torch, job.dtype), shape_of(str(job.shape))
    if job.method == "dflash":
        ends = random_ends(shape.target, device, dtype)
        block = random_block(shape, ends).model
        assert isinstance(block, BlockModel)
        save_dflash(directory, block, dtype, frozenset((EMBEDDINGS, HEAD)))
    else:
        model = random_drafter(shape, job.method, device, dtype).model
        assert isinstance(model, DraftModel)
        save_drafter(directory, model, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def speeds(llm: Any, job: Job, concurrency: int) -> list[float]:
    """Output tokens per second of each round with `concurrency` requests, after a warm-up.

    The warm-up is a short and a whole round: some of vLLM's kernels are tuned at their first use.
    """
    vocab_size = shape_of(str(job.shape)).target.vocab_size
    prompts = random_prompts(concurrency, job.prompt_tokens, vocab_size)
    asked = [(prompt, job.max_tokens) for prompt in prompts]
    complete(llm, [(prompt, job.warm_up_tokens) for prompt in prompts])
    complete(llm, asked)
    rounds = []
    for _ in range(job.rounds):
        start = time.perf_counter()
        outputs = complete(llm, asked)
        rounds.append(sum(map(len, outputs)) / (time.perf_counter() - start))
    return rounds


def complete(llm: Any, asked: Sequence[Asked]) -> list[list[int]]:
    """The output of each prompt, greedy and of exactly so many tokens."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for _, count in asked
    ]
    requests = [{"prompt_token_ids": [*prompt]} for prompt, _ in asked]
    done = llm.generate(requests, params, use_tqdm=False)
    outputs = [[*request.outputs[0].token_ids] for request in done]
    assert [*map(len, outputs)] == [count for _, count in asked], "outputs of other lengths"
    return outputs


def versions() -> dict[str, str]:
    """Versions of vLLM and of what its speed depends on, as far as they are there."""
    import vllm

    found = {"vllm": vllm.__version__, "torch": torch.__version__}
    with suppress(PackageNotFoundError):  # a CPU needs none
        found["triton"] = version("triton")
    return found


def resolved(llm: Any) -> dict[str, Any]:
    """What vLLM made of its arguments; the reason where this version keeps them elsewhere."""
    try:
        config = llm.llm_engine.vllm_config
        compilation = config.compilation_config
        return {
            "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
            "async_scheduling": config.scheduler_config.async_scheduling,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "max_cudagraph_capture_size": compilation.max_cudagraph_capture_size,
            "prefix_caching": config.cache_config.enable_prefix_caching,
        }
    except AttributeError as error:
        return {"unknown": str(error)}


if __name__ == "__main__":
    main(*sys.argv[1:])
