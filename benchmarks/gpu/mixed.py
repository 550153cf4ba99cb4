"""Prompts and outputs of random lengths: tokens per second of our engine and of vLLM.

    python benchmarks/gpu/mixed.py qwen3-8b:peagle --vllm-python vllm/bin/python --out mixed.json

`compare.py` gives all requests one length, which hides what a new length costs and how long a
context of thousands keeps one of hundreds waiting. Here lengths are random, most short and few
long, the same lists on both sides, and as soon as a request ends the next one begins. Weights are
random and acceptance is set, as there. Our side runs with K fixed and with K by load; vLLM with its
default graphs and with graphs large enough for its drafter, of which the faster counts; each in its
own process. The first list is not counted. vLLM also runs the others once before they count: it
tunes kernels on the way.
"""

import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from matches import NOT_DUMMY, Match, Work, peer_job, trials
from sides import Vllm

from peagle.bench.case import Setup
from peagle.bench.environment import hardware, machine
from peagle.bench.load import Request, drive
from peagle.bench.measures import Measures, measure
from peagle.bench.result_file import result_file
from peagle.bench.shapes import random_prompts, shape_of
from peagle.bench.synthetic import SyntheticWorkload
from peagle.cli.script import run
from peagle.config import DraftLengthMode, SamplingParams
from peagle.errors import InputError
from peagle.llm import LLM

PEER = Path(__file__).parent / "mixed_peer.py"
LEAST = 16
"""Fewest tokens of a prompt and of an output."""
SPREAD = 1.0
"""Standard deviation of a length's logarithm."""


Asked = tuple[list[int], int]
"""A prompt, and its number of output tokens."""


@dataclass(frozen=True)
class Mix:
    """The requests of a list, by their lengths."""

    requests: int
    in_flight: int
    prompt_tokens: tuple[int, int]
    """Median and maximum."""
    output_tokens: tuple[int, int]
    rounds: int

    def lists(self, vocab_size: int) -> list[list[Asked]]:
        """The list that is not counted, then those that are."""
        return [self._list(seed, vocab_size) for seed in range(self.rounds + 1)]

    def _list(self, seed: int, vocab_size: int) -> list[Asked]:
        draw = random.Random(seed)

        def length(median: int, most: int) -> int:
            return min(most, max(LEAST, int(median * draw.lognormvariate(0, SPREAD))))

        def asked() -> Asked:
            tokens, most = length(*self.prompt_tokens), length(*self.output_tokens)
            return random_prompts(1, tokens, vocab_size, draw.getrandbits(32))[0], most

        return [asked() for _ in range(self.requests)]


def main(
    match: Annotated[str, typer.Argument(help="SHAPE:METHOD[:K:AL], as compare.py takes them.")],
    requests: Annotated[int, typer.Option(help="Requests per list.")] = 128,
    in_flight: Annotated[int, typer.Option(help="Requests in flight.")] = 64,
    prompts: Annotated[str, typer.Option(help="Median and most prompt tokens.")] = "330,3000",
    outputs: Annotated[str, typer.Option(help="Median and most output tokens.")] = "200,1000",
    rounds: Annotated[int, typer.Option(help="Lists that count.")] = 3,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations.")] = Work.dtype,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Target that both sides read, by checkpoint.py.")
    ] = None,
    vllm_python: Annotated[Path, typer.Option(help="vLLM's interpreter.")] = Path(sys.executable),
    vllm_path: Annotated[Path | None, typer.Option(help="Directory of vLLM's packages.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds allowed for vLLM's process.")] = 400,
    out: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Print tokens per second of every list, on each side."""
    chosen = Match.parse(match)
    if checkpoint is None and not chosen.plain:
        raise InputError(f"{chosen.shape} {NOT_DUMMY}: give --checkpoint DIR")
    mix = Mix(requests, in_flight, _two(prompts), _two(outputs), rounds)
    kinds: tuple[DraftLengthMode, ...] = ("fixed", "auto") if chosen.k else ("fixed",)
    spawning = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    with result_file(out) as write:
        for kind in kinds:
            with ProcessPoolExecutor(1, spawning) as process:  # its end frees its GPU memory
                found[kind] = process.submit(ours, chosen, mix, dtype, kind, checkpoint).result()
            print(json.dumps({kind: found[kind]}), flush=True)
        vllm = Vllm(vllm_python, vllm_path)
        if vllm.found():
            found["vllm"] = theirs(chosen, mix, dtype, vllm, timeout, checkpoint)
            print(json.dumps({"vllm": found["vllm"]}), flush=True)
            speeds = {side: statistics.median(runs["otps"]) for side, runs in found.items()}
            print(json.dumps({kind: round(speeds[kind] / speeds["vllm"], 3) for kind in kinds}))
        else:
            print(f"{vllm.python} finds no vLLM: it is left out", file=sys.stderr)
        facts = machine() | hardware("auto", dtype) | {"match": vars(chosen), "mix": vars(mix)}
        write(facts | found)


def ours(
    match: Match, mix: Mix, dtype: Any, kind: DraftLengthMode, checkpoint: Path | None = None
) -> dict[str, list[float]]:
    """Output tokens per second and median time to first token of each list that counts."""
    longest = mix.prompt_tokens[1], mix.output_tokens[1]
    length = match.acceptance_length
    work = SyntheticWorkload(match.shape, length, *longest, dtype, checkpoint=checkpoint)
    llm = work.open(Setup(match.method, match.k, kind), mix.in_flight)
    found = [_measured(llm, asked, mix.in_flight) for asked in mix.lists(_vocab_size(match))][1:]
    return {
        "otps": [round(one.otps, 1) for one in found],
        "ttft_ms": [round(one.ttft_ms.p50, 1) for one in found],
    }


def _measured(llm: LLM, asked: Sequence[Asked], in_flight: int) -> Measures:
    requests = [
        Request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        for prompt, count in asked
    ]
    start = time.perf_counter()
    completions = drive(llm, requests, in_flight)
    return measure(completions, time.perf_counter() - start)


def theirs(
    match: Match,
    mix: Mix,
    dtype: str,
    vllm: Vllm,
    timeout: float,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """vLLM's tokens per second with the faster of its settings, and that setting."""
    work = Work(mix.prompt_tokens[1], mix.output_tokens[1], mix.rounds, mix.in_flight, dtype)
    lists = {"lists": mix.lists(_vocab_size(match))}
    tried = [
        {
            "captured": trial.captured,
            "otps": [
                round(one, 1)
                for one in vllm.answer(PEER, peer_job(trial, work, checkpoint) | lists, timeout)
            ],
        }
        for trial in trials("vllm", match, (mix.in_flight,))
    ]
    return max(tried, key=lambda one: statistics.median(one["otps"]))


def _vocab_size(match: Match) -> int:
    return shape_of(match.shape).target.vocab_size


def _two(text: str) -> tuple[int, int]:
    try:
        median, most = (int(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{text}: give a median and a maximum, such as 330,3000") from None
    return median, most


if __name__ == "__main__":
    run(main)
