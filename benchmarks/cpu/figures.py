"""The figures of the bundled pair, measured in one run on this machine.

    python benchmarks/cpu/figures.py --prompts ../shared/data/HumanEval.jsonl.gz \\
        --vllm-python .venv-vllm/bin/python

All sides run on the same models, prompts, dtype and threads. They take turns, every side once per
round, since a shared machine changes from minute to minute; the median round counts. All runs go to
a dated JSON file, the tables to a page beside it.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from page import Figure, render
from peers import HERE, Peer, median_peer, open_sides
from transformers import AutoTokenizer

from peagle.bench.load import PromptWorkload, Run, list_cases
from peagle.bench.pair import METHODS, choose_pair
from peagle.bench.prompts import load_prompts
from peagle.bench.report import environment
from peagle.bench.rounds import median_runs, take_turns
from peagle.bench.verdict import compare
from peagle.cli.script import run
from peagle.files import whole_file

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
    out: Annotated[Path, typer.Option(help="Directory for the results.")] = HERE / "results",
) -> None:
    """Measure every side, write the result files and print the page."""
    pair = choose_pair(METHODS, target, {"eagle3": eagle3, "peagle": peagle})
    pair.check(max(KS))
    given = tuple(replace(prompt, stop=()) for prompt in load_prompts(prompts, limit))
    workload = PromptWorkload(pair, given, max_tokens, "float32", "cpu")
    facts = environment(workload) | {"prompt_file": Path(prompts).name, "rounds": rounds}
    facts["target"] = _shown(facts["target"])
    facts["drafters"] = {name: _shown(place) for name, place in facts["drafters"].items()}
    with open_sides(_job(workload), max(KS), vllm_python) as sides:
        ours, theirs = [], []
        turns = take_turns(workload, list_cases(METHODS, KS, (1,)))
        for index in range(rounds):
            print(f"round {index + 1} of {rounds}", file=sys.stderr)
            ours.append(next(turns))
            theirs.append([side.run() for side in sides])
    runs = median_runs(ours)
    by_side = zip(sides, zip(*theirs, strict=True), strict=True)
    peers = [median_peer(side, tries, runs[0].outputs) for side, tries in by_side]
    _write(out, facts, runs, peers)


def _shown(directory: str) -> str:
    """A directory relative to this one, without the machine's own paths."""
    return os.path.relpath(directory)


def _job(workload: PromptWorkload) -> dict[str, Any]:
    """The same work in the form that the peers' scripts read."""
    tokenizer = AutoTokenizer.from_pretrained(workload.pair.target)
    return {
        "target": workload.pair.target,
        "drafter": workload.pair.drafters["peagle"],
        "dtype": workload.dtype,
        "threads": torch.get_num_threads(),
        "prompts": [prompt.token_ids(tokenizer) for prompt in workload.prompts],
        "max_tokens": workload.max_tokens,
    }


def figures(runs: Sequence[Run], peers: Sequence[Peer]) -> Iterator[Figure]:
    """Required figures beside the measured ones."""
    none, eagle3, peagle = (_fastest(runs, method) for method in METHODS)
    yield _ratio("P-EAGLE at its best K over no speculation", 2.0, compare(peagle, none).median)
    yield _ratio("P-EAGLE over EAGLE-3, best K each", 1.15, compare(peagle, eagle3).median)
    longest = next(run for run in runs if run.case.method == "peagle" and run.case.k == max(KS))
    length = longest.measures.acceptance_length
    yield Figure(f"P-EAGLE AL at K = {max(KS)}", "3.5", f"{length:.2f}")
    transformers = max(peer.otps for peer in peers if peer.k == 0)
    yield _ratio("no speculation over transformers", 1.2, none.measures.otps / transformers)
    for vllm in sorted((peer for peer in peers if peer.k), key=lambda peer: -peer.otps)[:1]:
        ratio = longest.measures.otps / vllm.otps
        yield _ratio(f"P-EAGLE over {vllm.name}, K = {vllm.k}", 1.2, ratio)
    same = min(sum(map(tuple.__eq__, run.outputs, none.outputs)) for run in runs)
    yield Figure("prompts identical to no speculation", "all", f"{same} of {len(none.outputs)}")


def _fastest(runs: Sequence[Run], method: str) -> Run:
    return max((r for r in runs if r.case.method == method), key=lambda run: run.measures.otps)


def _ratio(name: str, asked: float, measured: float) -> Figure:
    return Figure(name, f"{asked}x", f"{measured:.2f}x")


def _write(out: Path, facts: dict[str, Any], runs: Sequence[Run], peers: Sequence[Peer]) -> None:
    found = list(figures(runs, peers))
    result = {
        "environment": facts,
        "figures": [asdict(figure) for figure in found],
        "runs": [run.as_json() for run in runs],
        "peers": [asdict(peer) for peer in peers],
    }
    out.mkdir(parents=True, exist_ok=True)
    name = f"cpu_{facts['date'][:10]}"
    text = render(facts, found, runs, peers)
    with whole_file(out / f"{name}.json") as data, whole_file(out / f"{name}.md") as page:
        data.write(json.dumps(result, indent=2) + "\n")
        page.write(text)
    print(text)


if __name__ == "__main__":
    run(main)
