"""vLLM's side of the figures, in vLLM's own environment: `vllm_side.py FD`, a socket to `peers.py`.

One request at a time through `LLM.generate`, after a warm-up, greedy, end of text ignored, without
prefix caching, as the other sides do. A job says whether the engine compiles or runs eagerly.
"""

import os
import sys
import time
from multiprocessing.connection import Connection

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
# In its own process vLLM's engine leaves one of the cores to the other process: 83 tokens/s
# against 113 in this one (random 15M-parameter target, K = 3, two cores).
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
WARM_UP_PROMPTS = 4


def main(socket: str) -> None:
    import vllm

    connection = Connection(int(socket))
    job = connection.recv()
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

    def complete(prompt: list[int]) -> tuple[float, list[int]]:
        start = time.perf_counter()
        (request,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return time.perf_counter() - start, list(request.outputs[0].token_ids)

    for prompt in job["prompts"][:WARM_UP_PROMPTS]:
        complete(prompt)
    connection.send(vllm.__version__)
    while connection.recv() == "run":
        connection.send([complete(prompt) for prompt in job["prompts"]])


if __name__ == "__main__":
    main(*sys.argv[1:])
