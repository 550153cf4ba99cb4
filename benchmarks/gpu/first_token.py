"""Time to first token, by a prompt's length and by how much of it the prefix cache holds.

    python benchmarks/gpu/first_token.py --shape qwen3-8b --lengths 16,64,256 --cached 0,8192

Random weights; one request at a time. After a cached prefix the length is that of the new part; up
to a block of the prefix (with a drafter and a prefix that ends with a block, all of the block) runs
as well. The first prompt of each length is reported separately: it pays for one-time preparation.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matches import METHODS

from peagle.bench.environment import hardware, machine
from peagle.bench.result_file import result_file
from peagle.bench.shapes import random_engine, random_prompts
from peagle.bench.synthetic import DRAFT_LAYERS, acceptance_rates
from peagle.cli.script import run
from peagle.config import EngineConfig, SamplingParams
from peagle.engine.engine import Engine

TOKENS = 9
"""Tokens of each answer."""


def main(
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    method: Annotated[str, typer.Option(help="none, peagle or eagle3.")] = "peagle",
    lengths: Annotated[str, typer.Option(help="New tokens of the prompts.")] = "16,64,256,512,1024",
    cached: Annotated[str, typer.Option(help="Cached tokens before them.")] = "0",
    rounds: Annotated[int, typer.Option(help="Prompts of each kind, the first included.")] = 8,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Print a line for each length and cached prefix."""
    news, olds = ([int(number) for number in given.split(",")] for given in (lengths, cached))
    k, acceptance = METHODS[method]
    with result_file(out) as write:
        config = EngineConfig(max_num_seqs=1, max_model_len=max(news) + max(olds) + TOKENS + 1)
        rates = acceptance_rates(k, acceptance)
        engine = random_engine(shape, method, k, DRAFT_LAYERS.get(method, 0), rates, config)
        rows = [measure(engine, old, new, rounds) for old in olds for new in news]
        facts = machine() | hardware("auto", "auto") | {"shape": shape, "method": method}
        write(facts | {"rows": rows})


def measure(engine: Engine, old: int, new: int, rounds: int) -> dict[str, Any]:
    """The median over prompts that share their first `old` tokens."""
    prefix = random_prompts(1, old, engine.vocab_size, seed=old)[0]
    if old:
        first_token(engine, prefix)
    prompts = random_prompts(rounds, new, engine.vocab_size, seed=old + new)
    first, *rest = (1e3 * first_token(engine, prefix + prompt) for prompt in prompts)
    row = {"cached": old, "new": new, "first": first, "milliseconds": statistics.median(rest)}
    row = {name: round(value, 2) for name, value in row.items()}
    print(json.dumps(row), flush=True)
    return row


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds on an idle engine, once a cycle launched past its last request has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    request = engine.add(f"at {begun}", prompt, params)
    while not request.output:
        engine.step()
    seconds = time.perf_counter() - begun
    while engine.busy:
        engine.step()
    return seconds


if __name__ == "__main__":
    run(main)
