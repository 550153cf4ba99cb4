"""The figures of the bundled pair beside transformers and vLLM, in one report on this machine.

    python benchmarks/cpu/figures.py --prompts ../shared/data/HumanEval.jsonl.gz \\
        --vllm-python .venv-vllm/bin/python

All sides run on the same models, prompts, dtype and threads, and take turns as in `peagle bench`,
one request at a time. Peers give whole answers, so that of their latencies only E2E is known.
"""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peers import HERE, Side, open_sides
from rich.console import Console
from transformers import AutoTokenizer

from peagle.bench.advice import Price
from peagle.bench.case import Grid
from peagle.bench.environment import environment
from peagle.bench.pair import METHODS, choose_pair
from peagle.bench.prompts import load_sets
from peagle.bench.report.report import Report
from peagle.bench.result_file import result_file
from peagle.bench.rounds import open_cases, take_turns
from peagle.bench.runs import Results, Run
from peagle.bench.workload import PromptWorkload
from peagle.cli.measurement import show_runs
from peagle.cli.script import run
from peagle.config import SamplingParams

KS = (3, 5, 7)
Directory = Annotated[str | None, typer.Option(help="Directory to use instead of the bundled one.")]


def main(
    prompts: Annotated[str, typer.Option(help="HumanEval's file, or other prompts.")],
    vllm_python: Annotated[Path | None, typer.Option(help="Python of vLLM's environment.")] = None,
    target: Directory = None,
    eagle3: Directory = None,
    peagle: Directory = None,
    limit: Annotated[int, typer.Option(help="Number of prompts.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each.")] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds of each side.")] = 7,
    out: Annotated[Path, typer.Option(help="Directory for the report.")] = HERE / "results" / "cpu",
) -> None:
    """Measure every side, print the table and write the report."""
    pair = choose_pair(METHODS, target, {"eagle3": eagle3, "peagle": peagle})
    pair.check(max(KS))
    sets = {
        name: tuple(replace(prompt, stop=()) for prompt in given)
        for name, given in load_sets([prompts], limit).items()
    }
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    workload = PromptWorkload(pair, sets, params, "float32", "cpu")
    out.mkdir(parents=True, exist_ok=True)
    with (
        open_sides(_job(workload), max(KS), vllm_python) as sides,
        result_file(out / "result.json") as write,
    ):
        facts = _facts(workload, sides)
        runs = _measure(workload, sides, rounds)
        write({"environment": facts, "runs": [each.as_json() for each in runs]})
    Report(out, Price(), shlex.join(["python", *sys.argv])).write(facts, runs, [])
    show_runs(Console(highlight=False), runs)


def _measure(workload: PromptWorkload, sides: list[Side], rounds: int) -> list[Run]:
    """Median runs of all sides."""
    cases = Grid([1], list(workload.sets)).cases(METHODS, dict.fromkeys(METHODS, KS))
    ready = [*open_cases(workload, cases), *sides]
    results = Results([one.case for one in ready], comparable=True)
    for done in take_turns(ready, rounds):
        if not isinstance(done, Run):
            raise SystemExit(f"{done.case.label} failed: {done.reason}")
        print(f"{done.case.label}: {done.measures.otps:.1f} tokens/s", file=sys.stderr)
        results.add(done)
    return results.medians()


def _facts(workload: PromptWorkload, sides: list[Side]) -> dict[str, Any]:
    """What figures depend on, with directories relative to this one: none of the machine's own."""
    facts = environment(workload)
    facts["target"] = os.path.relpath(facts["target"])
    facts["drafters"] = {name: os.path.relpath(place) for name, place in facts["drafters"].items()}
    facts["versions"] |= {side.case.method: side.version for side in sides}
    return facts


def _job(workload: PromptWorkload) -> dict[str, Any]:
    """The same work in the form that the peers' scripts read."""
    tokenizer = AutoTokenizer.from_pretrained(workload.pair.target)
    ((data, prompts),) = workload.sets.items()
    return {
        "target": workload.pair.target,
        "drafter": workload.pair.drafters["peagle"],
        "dtype": workload.dtype,
        "threads": torch.get_num_threads(),
        "data": data,
        "prompts": [prompt.token_ids(tokenizer) for prompt in prompts],
        "max_tokens": workload.sampling.max_tokens,
    }


if __name__ == "__main__":
    run(main)
