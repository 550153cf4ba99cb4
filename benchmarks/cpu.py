"""The figures of the bundled pair beside transformers and vLLM, in one report on this machine.

    python benchmarks/cpu.py --prompts ../shared/data/HumanEval.jsonl.gz \\
        --vllm-python .venv-vllm/bin/python

All sides run on the same models, prompts, dtype and threads, and take turns as in `peagle bench`,
one request at a time. Peers give whole answers, so that of their latencies only E2E is known.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoTokenizer

from draw import write_report
from peagle.bench.case import Grid
from peagle.bench.environment import environment
from peagle.bench.pair import METHODS, choose_pair
from peagle.bench.prompts import load_sets
from peagle.bench.rounds import OpenCase, open_cases, take_turns
from peagle.bench.runs import Results, Run
from peagle.bench.workload import PromptWorkload
from peagle.cli.measurement import show_runs
from peagle.cli.script import run
from peagle.config import EngineConfig, SamplingParams
from peers.turns import Side, open_sides
from records.bench import run_of
from records.measuring import begun
from records.result import Result
from records.store import write

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
    out: Annotated[Path, typer.Option(help="Directory for the report.")] = Path("build/cpu"),
) -> None:
    """Measure every side, print the table and write the report."""
    pair = choose_pair(METHODS, target, {"eagle3": eagle3, "peagle": peagle})
    pair.examine()
    sets = {
        name: tuple(replace(prompt, stop=()) for prompt in given)
        for name, given in load_sets([prompts], limit).items()
    }
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    workload = PromptWorkload(pair, sets, params, EngineConfig(dtype="float32", device="cpu"))
    out.mkdir(parents=True, exist_ok=True)
    with open_sides(_job(workload), max(KS), vllm_python) as sides:
        about = begun("The bundled pair beside transformers and vLLM on a CPU, all in turns")
        runs = _measure(workload, sides, rounds)
    found = _result(about, workload, sides, runs)
    write(found, out / "result.json")
    write_report(found, out / "report")
    show_runs(Console(highlight=False), runs)


def _result(
    about: dict[str, Any], workload: PromptWorkload, sides: list[Side], runs: list[Run]
) -> Result:
    """All sides' runs, and what they depend on, with directories relative to this one."""
    facts = environment(workload)
    setting = {name: facts[name] for name in ("dtype", "prompts", "turns", "max_tokens", "ends")}
    setting["target"] = os.path.relpath(facts["target"])
    setting["drafters"] = {
        name: os.path.relpath(place) for name, place in facts["drafters"].items()
    }
    others = {side.case.method: side for side in sides}
    kept = []
    for one in runs:
        named = {}
        if (side := others.get(one.case.method)) is not None:
            method = "peagle" if one.case.k else "none"
            named = {"side": side.engine, "setting": side.setting, "method": method}
        kept.append(run_of(one.as_json(), **named))
    versions = {side.engine: {side.engine: side.version} for side in sides}
    about["versions"] |= versions
    return Result(**about, setting=setting, runs=tuple(kept))


def _measure(workload: PromptWorkload, sides: list[Side], rounds: int) -> list[Run]:
    """Median runs of all sides."""
    cases = Grid([1], list(workload.sets)).cases(METHODS, dict.fromkeys(METHODS, KS))
    ready: list[OpenCase] = [*open_cases(workload, cases), *sides]
    results = Results([one.case for one in ready], comparable=True)
    for done in take_turns(ready, rounds):
        if not isinstance(done, Run):
            raise SystemExit(f"{done.case.label} failed: {done.reason}")
        print(f"{done.case.label}: {done.measures.otps:.1f} tokens/s", file=sys.stderr)
        results.add(done)
    return results.medians()


def _job(workload: PromptWorkload) -> dict[str, Any]:
    """The same work in the form that the peers' scripts read."""
    tokenizer = AutoTokenizer.from_pretrained(workload.pair.target)
    ((data, prompts),) = workload.sets.items()
    return {
        "target": workload.pair.target,
        "drafter": workload.pair.drafters["peagle"],
        "dtype": workload.engine.dtype,
        "threads": torch.get_num_threads(),
        "data": data,
        "prompts": [prompt.token_ids(tokenizer) for prompt in prompts],
        "max_tokens": workload.sampling.max_tokens,
    }


if __name__ == "__main__":
    run(main)
