"""How many greedy outputs stay the same under speculation, where rounding may decide.

    python benchmarks/equal.py --dtype bfloat16 --vllm-python vllm/bin/python --out equal.json

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
from typing import Annotated, cast

import typer

from peagle.bench.case import Case, Grid
from peagle.bench.environment import environment
from peagle.bench.pair import METHODS, choose_pair
from peagle.bench.prompts import load_prompts
from peagle.bench.rounds import run_engines
from peagle.bench.runs import Run
from peagle.bench.workload import PromptWorkload
from peagle.cli.script import run
from peagle.config import DType, EngineConfig, SamplingParams
from peagle.models.tokenizer import load_tokenizer
from peers import card
from peers.job import Job
from peers.processes import Vllm
from records.measuring import begun, written
from records.result import Row

MEMORY_SHARE = 0.5
"""Of the card's memory, for vLLM."""
UNITS = {"equal": "outputs", "kept": "tokens"}
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
        pair, {"bundled": given}, params, EngineConfig(dtype=kind, batch_invariant=batch_invariant)
    )
    cases = Grid([concurrency]).cases(METHODS, {method: [k] for method in METHODS})
    about = begun("Greedy outputs that stay equal under speculation", card.reading())
    facts = {name: environment(workload)[name] for name in ("dtype", "target", "prompts")}
    facts["target"] = Path(facts["target"]).name
    facts |= {"k": k, "concurrency": concurrency, "max_tokens": max_tokens}
    with written(out, about, UNITS, **facts, batch_invariant=batch_invariant) as write:
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawning) as process:  # its end frees its GPU memory
            rows = _rows("peagle", process.submit(ours, workload, cases).result(), max_tokens)
        _tell(rows)
        write(rows)
        vllm = Vllm(vllm_python, vllm_path)
        if vllm.found():
            rows += _rows("vllm", theirs(workload, cases, vllm, timeout), max_tokens)
            _tell(rows[-2:])
            write(rows)


def ours(workload: PromptWorkload, cases: Sequence[Case]) -> dict[str, Outputs]:
    """Token ids of our outputs, by method."""
    done = run_engines(workload, cases, rounds=1)
    return {run.case.method: run.outputs for run in done if isinstance(run, Run)}


def theirs(
    workload: PromptWorkload, cases: Sequence[Case], vllm: Vllm, timeout: float
) -> dict[str, Outputs]:
    """The same for vLLM, a process per method; exits with the last lines of one that failed."""
    tokenizer = load_tokenizer(Path(workload.pair.target))
    prompts = [prompt.token_ids(tokenizer) for prompt in workload.sets["bundled"]]
    jobs = {
        case.method: Job(
            method=case.method,
            k=case.k or 0,
            dtype=workload.engine.dtype,
            max_num_seqs=case.concurrency,
            max_tokens=workload.sampling.max_tokens,
            checkpoint=workload.pair.target,
            drafter=workload.pair.drafters.get(case.method),
            memory_share=MEMORY_SHARE,
            prompts=prompts,
        )
        for case in cases
    }
    return {method: vllm.outputs(job, timeout) for method, job in jobs.items()}


def _rows(side: str, outputs: dict[str, Outputs], whole: int) -> list[Row]:
    """For each drafter how many outputs equal those without one, and how many tokens each output
    keeps before the first that differs."""
    rows: list[Row] = []
    for method, found in outputs.items():
        if method != "none":
            kept = [_alike(*pair) for pair in zip(found, outputs["none"], strict=True)]
            equal = sum(count == whole for count in kept)
            told: Row = {"equal": equal, "of": len(kept), "kept": tuple(map(float, kept))}
            rows.append({"who": side, "method": method, **told})
    return rows


def _tell(rows: Sequence[Row]) -> None:
    for row in rows:
        print(
            json.dumps({name: value for name, value in row.items() if name != "kept"}), flush=True
        )


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    same = (a == b for a, b in zip(one, other, strict=True))
    return sum(1 for _ in itertools.takewhile(bool, same))


if __name__ == "__main__":
    run(main)
