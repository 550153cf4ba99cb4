"""transformers' side of the figures: `transformers_side.py FD`, a socket to `peers.py`.

`generate` on the same target, prompts, dtype and threads, one request at a time, greedy, every
output of full length.
"""

import sys
import time
from multiprocessing.connection import Connection

import torch
import transformers

WARM_UP_PROMPTS = 4


def main(socket: str) -> None:
    connection = Connection(int(socket))
    job = connection.recv()
    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["target"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # never ends early, and costs nothing to ignore

    def complete(prompt: list[int]) -> tuple[float, list[int]]:
        start = time.perf_counter()
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        written = model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=job["max_tokens"]
        )
        output = written[0, len(prompt) :].tolist()
        return time.perf_counter() - start, output

    for prompt in job["prompts"][:WARM_UP_PROMPTS]:
        complete(prompt)
    connection.send(transformers.__version__)
    while connection.recv() == "run":
        connection.send([complete(prompt) for prompt in job["prompts"]])


if __name__ == "__main__":
    main(*sys.argv[1:])
