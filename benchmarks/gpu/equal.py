"""How many greedy outputs stay the same under speculation, where rounding may decide.

    python benchmarks/gpu/equal.py --dtype bfloat16 --vllm-python vllm/bin/python --out equal.json

A pair, the bundled one unless another is named, completes the same prompts without a drafter and
with each, here and in vLLM. In float32 all outputs are equal; in bfloat16 a verification of K + 1
rows rounds differently from a single row, and a near-tie may flip, unless `--batch-invariant` is
given. From there on both texts are the target's own.
"""

import itertools
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from sides import Vllm

from peagle.bench.case import Case, Grid
from peagle.bench.environment import environment
from peagle.bench.pair import METHODS, Pair, choose_pair
from peagle.bench.prompts import load_prompts
from peagle.bench.result_file import result_file
from peagle.bench.rounds import run_engines
from peagle.bench.runs import Run
from peagle.bench.workload import PromptWorkload
from peagle.cli.script import run
from peagle.config import DType, SamplingParams
from peagle.models.tokenizer import load_tokenizer

PEER = Path(__file__).parent / "equal_peer.py"
Outputs = Sequence[Sequence[int]]


def main(
    target: Annotated[str | None, typer.Argument(help="As in peagle bench.")] = None,
    eagle3: Annotated[str | None, typer.Option(help="As in peagle bench.")] = None,
    peagle: Annotated[str | None, typer.Option(help="As in peagle bench.")] = None,
    prompts: Annotated[str, typer.Option(help="As in peagle bench.")] = "bundled",
    limit: Annotated[int, typer.Option(help="Number of prompts.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Tokens per output.")] = 128,
    k: Annotated[int, typer.Option("--k", help="Tokens to draft.")] = 7,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 8,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations.")] = "bfloat16",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Of ours: sums that no load changes.")
    ] = False,
    vllm_python: Annotated[Path, typer.Option(help="vLLM's interpreter.")] = Path(sys.executable),
    vllm_path: Annotated[Path | None, typer.Option(help="Directory of vLLM's packages.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds allowed per process of vLLM.")] = 400,
    out: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Print, for each side and drafter, how many outputs equal those without one."""
    pair = choose_pair(METHODS, target, {"eagle3": eagle3, "peagle": peagle})
    given = tuple(replace(prompt, stop=()) for prompt in load_prompts(prompts, limit))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    kind = cast(DType, dtype)
    workload = PromptWorkload(
        pair, {"bundled": given}, params, kind, batch_invariant=batch_invariant
    )
    cases = Grid([concurrency]).cases(METHODS, {method: [k] for method in METHODS})
    with result_file(out) as write:
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawning) as process:  # its end frees its GPU memory
            kept = {"peagle": _kept(process.submit(ours, workload, cases).result())}
        outputs = len(next(iter(kept["peagle"].values())))
        print(f"ours: {_equal(kept['peagle'], max_tokens)} of {outputs}", file=sys.stderr)
        vllm = Vllm(vllm_python, vllm_path)
        if vllm.found():
            kept["vllm"] = _kept(theirs(workload, cases, vllm, timeout))
        equal = {side: _equal(counts, max_tokens) for side, counts in kept.items()}
        print(json.dumps({"equal": equal, "of": outputs, "dtype": dtype}))
        facts = environment(workload) | {"k": k, "concurrency": concurrency}
        write(facts | {"equal": equal, "kept": kept})


def speculation(pair: Pair, case: Case) -> dict[str, Any] | None:
    """vLLM's settings for a case."""
    if not case.k:
        return None
    drafter = {"method": "eagle3", "model": pair.drafters[case.method]}
    parallel = case.method == "peagle"
    return {**drafter, "num_speculative_tokens": case.k, "parallel_drafting": parallel}


def ours(workload: PromptWorkload, cases: Sequence[Case]) -> dict[str, Outputs]:
    """Token ids of our outputs, by method."""
    done = run_engines(workload, cases, rounds=1)
    return {run.case.method: run.outputs for run in done if isinstance(run, Run)}


def theirs(
    workload: PromptWorkload, cases: Sequence[Case], vllm: Vllm, timeout: float
) -> dict[str, Outputs]:
    """The same for vLLM, a process per method; exits with the last lines of one that failed."""
    tokenizer = load_tokenizer(Path(workload.pair.target))
    asked = {
        "target": workload.pair.target,
        "prompts": [prompt.token_ids(tokenizer) for prompt in workload.sets["bundled"]],
        "max_tokens": workload.sampling.max_tokens,
        "concurrency": cases[0].concurrency,
        "dtype": workload.dtype,
    }
    jobs = {
        case.method: {**asked, "speculation": speculation(workload.pair, case)} for case in cases
    }
    return {method: vllm.answer(PEER, job, timeout) for method, job in jobs.items()}


def _kept(outputs: dict[str, Outputs]) -> dict[str, list[int]]:
    """For each drafter and output, the number of tokens before the first that differs from the
    output without a drafter."""
    return {
        method: [_alike(*pair) for pair in zip(of_method, outputs["none"], strict=True)]
        for method, of_method in outputs.items()
        if method != "none"
    }


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    same = (a == b for a, b in zip(one, other, strict=True))
    return sum(1 for _ in itertools.takewhile(bool, same))


def _equal(kept: dict[str, list[int]], whole: int) -> dict[str, int]:
    """For each drafter, the number of outputs that are equal to their end."""
    return {method: sum(count == whole for count in counts) for method, counts in kept.items()}


if __name__ == "__main__":
    run(main)
