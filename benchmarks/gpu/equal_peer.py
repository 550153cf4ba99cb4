"""vLLM's side of `equal.py`, in vLLM's own environment: `equal_peer.py JOB.json RESULT.json`."""

import json
import sys
from pathlib import Path
from typing import Any

MEMORY_SHARE = 0.5


def main(job_file: str, result_file: str) -> None:
    """Run one method."""
    job = json.loads(Path(job_file).read_text())
    Path(result_file).write_text(json.dumps(complete(job)))


def complete(job: dict[str, Any]) -> list[list[int]]:
    """Token ids of every output."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["target"],
        speculative_config=job["speculation"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_num_seqs=job["concurrency"],
        gpu_memory_utilization=MEMORY_SHARE,
        enable_prefix_caching=False,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    requests = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    done = llm.generate(requests, params, use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in done]


if __name__ == "__main__":
    main(*sys.argv[1:])
