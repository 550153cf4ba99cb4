"""Tokens per second of requests in whose choices the host takes part, beside that of others.

    python benchmarks/gpu/hosted.py --shape qwen3-8b --method peagle --concurrency 1,8,64

Random weights and given acceptance; times of prompts are in. The grammar allows every token, so its
rows show what the engine adds to a grammar's own work.
"""

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from synthetic_engine import synthetic_engine
from torch import Tensor

from peagle.bench.environment import hardware, machine
from peagle.bench.result_file import result_file
from peagle.bench.shapes import random_prompts
from peagle.cli.script import run
from peagle.config import SamplingParams
from peagle.engine.engine import Engine

PROMPT_TOKENS = 256
WAYS: dict[str, dict[str, Any]] = {
    "device alone": {},
    "sampled": {"temperature": 0.7, "top_p": 0.9},
    "bias": {"logit_bias": {1: 0.0}},
    "log-probabilities": {"logprobs": 5},
    "grammar": {},
    "sampled, bias": {"logit_bias": {1: 0.0}, "temperature": 0.7, "top_p": 0.9},
}
ALONE = "device alone", "sampled"
"""Ways in which the host takes no part."""
IDS = itertools.count()


class AnyToken:
    """A form that allows everything."""

    failure = None

    def __init__(self, vocab: int) -> None:
        self._bytes = -(-vocab // 8)

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """All bits."""
        return torch.full((len(drafts) + 1, self._bytes), 255, dtype=torch.uint8)

    def advance(self, tokens: Sequence[int]) -> None:
        """Nothing changes."""


def main(
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    method: Annotated[str, typer.Option(help="none, peagle or eagle3.")] = "peagle",
    concurrency: Annotated[str, typer.Option(help="Numbers of requests in flight.")] = "1,8,64",
    max_tokens: Annotated[int, typer.Option(help="Tokens per output.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds; the best of each way counts.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Print a line for each way and number of requests: all of them that way, then every eighth."""
    levels = [int(level) for level in concurrency.split(",")]
    with result_file(out) as write:
        engine = synthetic_engine(shape, method, max(levels), PROMPT_TOKENS + max_tokens)
        rows = [
            measure(engine, level, way, every, max_tokens, rounds)
            for level in levels
            for way in WAYS
            for every in (1, 8)
            if every == 1 or (level > 1 and way not in ALONE)
        ]
        facts = machine() | hardware("auto", "auto") | {"shape": shape, "method": method}
        write(facts | {"max_tokens": max_tokens, "rows": rows})


def measure(
    engine: Engine, level: int, way: str, every: int, max_tokens: int, rounds: int
) -> dict[str, Any]:
    """The best round of `level` requests, of which one in `every` goes that way."""
    found = [one_round(engine, level, way, every, max_tokens) for _ in range(rounds)]
    speed, step = max(found)
    row = {"requests": level, "way": way, "one_in": every}
    row |= {"tokens_per_second": round(speed, 1), "step_ms": round(1e3 * step, 2)}
    print(json.dumps(row), flush=True)
    return row


def one_round(
    engine: Engine, level: int, way: str, every: int, max_tokens: int
) -> tuple[float, float]:
    """Tokens per second, and the median step's seconds."""
    prompts = random_prompts(level, PROMPT_TOKENS, engine.vocab_size, seed=level)
    begun = time.perf_counter()
    for index, prompt in enumerate(prompts):
        chosen = way if index % every == 0 else "device alone"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **WAYS[chosen])
        form = AnyToken(engine.vocab_size) if chosen == "grammar" else None
        engine.add(f"request {next(IDS)}", prompt, params, form)
    steps = []
    while engine.busy:
        before = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - before)
    return level * max_tokens / (time.perf_counter() - begun), statistics.median(steps)


if __name__ == "__main__":
    run(main)
