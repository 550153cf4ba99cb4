"""Another engine's side of `cpu.py`, in its own environment: `turns_side.py ENGINE FD`.

FD is a socket to `turns.py`. One request at a time, greedy, end of text ignored, after a warm-up,
on the same target, prompts, dtype and threads. vLLM runs the job's drafter, compiled or eager,
without prefix caching; transformers runs none.
"""

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
# In its own process vLLM's engine leaves one of the cores to the other process: 83 tokens/s
# against 113 in this one (random 15M-parameter target, K = 3, two cores).
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
WARM_UP_PROMPTS = 4
Complete = Callable[[list[int]], list[int]]
"""The output of a prompt."""


def main(engine: str, socket: str) -> None:
    """Complete the job's prompts whenever it is this side's turn."""
    connection = Connection(int(socket))
    job = connection.recv()
    complete, version = {"transformers": transformers_side, "vllm": vllm_side}[engine](job)

    def timed(prompt: list[int]) -> tuple[float, list[int]]:
        start = time.perf_counter()
        output = complete(prompt)
        return time.perf_counter() - start, output

    for prompt in job["prompts"][:WARM_UP_PROMPTS]:
        complete(prompt)
    connection.send(version)
    while connection.recv() == "run":
        connection.send([timed(prompt) for prompt in job["prompts"]])


def transformers_side(job: dict[str, Any]) -> tuple[Complete, str]:
    """transformers' `generate`, and its version."""
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["target"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # never ends early, and costs nothing to ignore

    def complete(prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt])
        how = {"do_sample": False, "max_new_tokens": job["max_tokens"]}
        written = model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
        output: list[int] = written[0, len(prompt) :].tolist()
        return output

    return complete, transformers.__version__


def vllm_side(job: dict[str, Any]) -> tuple[Complete, str]:
    """`LLM.generate` with the job's drafter, and vLLM's version."""
    import vllm

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
        [request] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return [*request.outputs[0].token_ids]

    return complete, vllm.__version__


if __name__ == "__main__":
    main(*sys.argv[1:])
