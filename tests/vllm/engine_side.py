"""vLLM's side of the counts; runs in vLLM's environment: `engine_side.py JOB.json RESULT.json`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # every engine in this one process
}
COUNTERS = "vllm:spec_decode_"


def main(job_file: str, result_file: str) -> None:
    """Run each trial of the job on an engine of its own, one after the other."""
    from vllm.distributed import cleanup_dist_env_and_memory

    results = []
    for trial in json.loads(Path(job_file).read_text()):
        print("trial:", trial["speculative_config"], flush=True)
        results.append(run(trial))
        cleanup_dist_env_and_memory()
    Path(result_file).write_text(json.dumps(results))


def run(trial: dict[str, Any]) -> dict[str, Any]:
    """Greedy output and accepted drafts of each request, and vLLM's own counters over all."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        trial["target"],
        speculative_config=trial["speculative_config"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        **trial["engine"],
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=trial["max_tokens"], ignore_eos=True, detokenize=False
    )
    done = []
    for batch in trial["batches"]:
        requests = [{"prompt_token_ids": prompt} for prompt in batch]
        done += [r.outputs[0] for r in llm.generate(requests, params, use_tqdm=False)]
    counted = {metric.name.removeprefix(COUNTERS): metric for metric in llm.get_metrics()}
    return {
        "outputs": [list(output.token_ids) for output in done],
        "accepted_per_cycle": [output.spec_decode_metrics.per_step_accepted for output in done],
        "cycles": counted["num_drafts"].value,
        "drafted": counted["num_draft_tokens"].value,
        "accepted": counted["num_accepted_tokens"].value,
        "accepted_per_position": counted["num_accepted_tokens_per_pos"].values,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
