"""vLLM's side of `mixed.py`, in vLLM's own environment: `mixed_peer.py JOB.json RESULT.json`."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_peer import open_llm


def main(job_file: str, result_file: str) -> None:
    """Run a job's lists twice over, so that kernels tuned on the way do not count."""
    job = json.loads(Path(job_file).read_text())
    with tempfile.TemporaryDirectory() as scratch:
        llm = open_llm(job, Path(scratch))
        first, *others = job["lists"]
        complete(llm, first)
        for asked in others:
            complete(llm, asked)
        Path(result_file).write_text(json.dumps([complete(llm, asked) for asked in others]))


def complete(llm: Any, asked: list[tuple[list[int], int]]) -> float:
    """Output tokens per second of one list."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for _, count in asked
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    start = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(request.outputs[0].token_ids) for request in done)
    assert tokens == sum(count for _, count in asked), f"{tokens} tokens came out"
    return tokens / seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
