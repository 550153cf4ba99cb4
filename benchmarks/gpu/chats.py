"""Tokens per second, text included, of chats with tools that may be called, beside those without.

    python benchmarks/gpu/chats.py --shape qwen3-8b --method peagle --concurrency 1,16

Random weights and given acceptance. The two take turns over the same prompts; the vocabulary is as
large as the shape's, and each token is a word, so that all of what is written is read as content.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from synthetic_engine import synthetic_engine
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from peagle.bench.environment import hardware, machine
from peagle.bench.result_file import result_file
from peagle.bench.shapes import random_prompts
from peagle.cli.script import run
from peagle.config import ChatConfig, SamplingParams
from peagle.dialects import Tool, ToolUse
from peagle.live_request import ChatTurn
from peagle.llm import LLM

PROMPT_TOKENS = 256
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = tuple(Tool(f"tool_{index}", SCHEMA) for index in range(10))
WAYS = {"no tools": ChatTurn(), "tools, auto": ChatTurn(ToolUse(TOOLS))}


def main(
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    method: Annotated[str, typer.Option(help="none, peagle or eagle3.")] = "peagle",
    concurrency: Annotated[str, typer.Option(help="Numbers of requests in flight.")] = "1,16",
    max_tokens: Annotated[int, typer.Option(help="Tokens per output.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds; the median of each way counts.")] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Print a line for each number of requests and way."""
    levels = [int(level) for level in concurrency.split(",")]
    with result_file(out) as write:
        engine = synthetic_engine(shape, method, max(levels), PROMPT_TOKENS + max_tokens)
        tokenizer = words(engine.vocab_size)
        llm = LLM.over(engine, tokenizer, ChatConfig(reasoning_parser="qwen3"))
        rows = [row for level in levels for row in measure(llm, level, max_tokens, rounds)]
        facts = machine() | hardware("auto", "auto") | {"shape": shape, "method": method}
        write(facts | {"max_tokens": max_tokens, "rows": rows})


def words(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` tokens, each a word but the last ones, a family's markers."""
    count = size - len(MARKERS)
    raw = Tokenizer(models.WordLevel({f" w{index}": index for index in range(count)}, " w0"))
    raw.decoder = decoders.Fuse()
    raw.add_tokens(list(MARKERS))
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False)


def measure(llm: LLM, level: int, max_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The median of each way, which take turns; a first round of each is not counted."""
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, turn in WAYS.items() if number % 2 else reversed(WAYS.items()):
            speeds[way].append(one_round(llm, level, turn, max_tokens))
    rows = []
    for way, found in speeds.items():
        kept = found[1:]
        row: dict[str, Any] = {"requests": level, "way": way}
        row |= {"tokens_per_second": round(statistics.median(kept), 1)}
        row["rounds"] = [round(speed, 1) for speed in kept]
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def one_round(llm: LLM, level: int, turn: ChatTurn, max_tokens: int) -> float:
    """Tokens per second of `level` chats at once."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    vocab = llm.engine.vocab_size - len(MARKERS)
    prompts = random_prompts(level, PROMPT_TOKENS, vocab, seed=level)
    begun = time.perf_counter()
    ids = {llm.submit(llm.prepare(prompt, params, turn)) for prompt in prompts}
    while ids:
        ids -= {chunk.request_id for chunk in llm.step() if chunk.completion is not None}
    return level * max_tokens / (time.perf_counter() - begun)


if __name__ == "__main__":
    run(main)
