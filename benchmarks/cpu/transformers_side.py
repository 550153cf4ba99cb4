"""transformers' side of the figures: `transformers_side.py JOB.json RESULT.json`.

`generate` on the same target, prompts, dtype and threads, one request at a time, greedy, every
output of full length.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers

WARM_UP_PROMPTS = 4


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["target"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # never ends early, and costs nothing to ignore

    def complete(prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        written = model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=job["max_tokens"]
        )
        return written[0, len(prompt) :].tolist()

    for prompt in job["prompts"][:WARM_UP_PROMPTS]:
        complete(prompt)
    seconds = []
    for _ in range(job["rounds"]):
        start = time.perf_counter()
        outputs = [complete(prompt) for prompt in job["prompts"]]
        seconds.append(time.perf_counter() - start)
    result = {"seconds": seconds, "outputs": outputs, "version": transformers.__version__}
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
