"""vLLM's side of the figures; runs in vLLM's own environment: `vllm_side.py JOB.json RESULT.json`.

One request at a time through `LLM.generate`, after a warm-up, greedy, end of text ignored, without
prefix caching, as the other sides do. A job says whether the engine compiles or runs eagerly.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
# In a process of its own vLLM's engine leaves one of the cores to the other process: 83 tokens/s
# against 113 in this one (random 15M-parameter target, K = 3, two cores).
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
WARM_UP_PROMPTS = 4


def main(job_file: str, result_file: str) -> None:
    import vllm

    job = json.loads(Path(job_file).read_text())
    llm = vllm.LLM(
        job["target"],
        dtype=job["dtype"],
        max_model_len=max(map(len, job["prompts"])) + job["max_tokens"] + 64,
        max_num_seqs=1,
        enforce_eager=job["eager"],
        enable_prefix_caching=False,
        speculative_config={
            "method": "eagle3",
            "model": job["drafter"],
            "num_speculative_tokens": job["k"],
            "parallel_drafting": True,
        },
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)

    def complete(prompt: list[int]) -> list[int]:
        (request,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return list(request.outputs[0].token_ids)

    for prompt in job["prompts"][:WARM_UP_PROMPTS]:
        complete(prompt)
    seconds = []
    for _ in range(job["rounds"]):
        start = time.perf_counter()
        outputs = [complete(prompt) for prompt in job["prompts"]]
        seconds.append(time.perf_counter() - start)
    result = {"seconds": seconds, "outputs": outputs, "version": vllm.__version__}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
