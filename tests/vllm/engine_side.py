"""vLLM's side of the counts; runs in vLLM's environment: `engine_side.py JOB.json RESULT.json`."""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
PREFIX = "vllm:spec_decode_"


def main(job_file: str, result_file: str) -> None:
    import vllm

    job = json.loads(Path(job_file).read_text())
    llm = vllm.LLM(
        job["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": job["drafter"],
            "num_speculative_tokens": job["k"],
            "parallel_drafting": job["parallel"],
        },
    )
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    outputs = []
    for batch in job["batches"]:
        requests = [{"prompt_token_ids": prompt} for prompt in batch]
        done = llm.generate(requests, params, use_tqdm=False)
        outputs += [list(request.outputs[0].token_ids) for request in done]
    result = {"outputs": outputs, **counters(llm.get_metrics())}
    Path(result_file).write_text(json.dumps(result))


def counters(metrics: list) -> dict:
    """Drafts made, tokens drafted, and tokens accepted at each position."""
    found = {metric.name.removeprefix(PREFIX): metric for metric in metrics}
    return {
        "cycles": found["num_drafts"].value,
        "drafted": found["num_draft_tokens"].value,
        "accepted": found["num_accepted_tokens"].value,
        "accepted_per_position": list(found["num_accepted_tokens_per_pos"].values),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
