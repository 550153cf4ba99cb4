"""Acceptance lengths of drafters of the bundled target, as the engine drafts with them.

    python benchmarks/acceptance/lengths.py eagle3 peagle DIRECTORY --prompts HumanEval.jsonl.gz

The target decides, so that the text must be the same in all cases of one temperature.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.bench.environment import machine
from peagle.bench.measures import acceptance_interval, acceptance_length, acceptance_rates
from peagle.bench.prompts import load_prompts
from peagle.bench.result_file import result_file
from peagle.cli.script import run
from peagle.config import DrafterFormat, EngineConfig
from peagle.pair import bundled

K = 7
BUNDLED = ("eagle3", "peagle")


def main(
    drafters: Annotated[list[str], typer.Argument(help="eagle3, peagle, or a directory.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines of prompts.")],
    limit: Annotated[int, typer.Option(help="How many of them.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,0.8,1",
    fp8: Annotated[bool, typer.Option(help="Round the drafters to FP8.")] = False,
    tree_nodes: Annotated[
        int | None, typer.Option(help="Of drafts that branch.", show_default="none do")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Print a line for each drafter and temperature."""
    texts = [prompt.text for prompt in load_prompts(str(prompts), limit)]
    heats = [*map(float, temperatures.split(","))]
    asked = {"prompts": prompts.name, "count": len(texts), "max_tokens": tokens, "k": K}
    asked |= {} if tree_nodes is None else {"tree_nodes": tree_nodes}
    about = machine() | asked
    wanted: dict[float, list[list[int]]] = {}
    kept: list[dict[str, Any]] = []
    with result_file(out) as write:
        for drafter in drafters:
            llm = opened(drafter, "fp8" if fp8 else None, tree_nodes, len(texts))
            for heat in heats:
                row, answers = measure(llm, texts, heat, tokens)
                assert wanted.setdefault(heat, answers) == answers, "a drafter changed a token"
                kept.append({"drafter": Path(drafter).name, "temperature": heat, "fp8": fp8} | row)
                print(f"{kept[-1]['drafter']:16} T = {heat:<4} {row['acceptance_length']:.3f}")
                write(about | {"rows": kept})


def opened(drafter: str, kind: DrafterFormat | None, tree_nodes: int | None, requests: int) -> LLM:
    """The bundled target with a drafter, whose cycles always have K drafts, or a tree, which few
    requests have."""
    place = bundled(drafter) if drafter in BUNDLED else drafter
    speculation = SpeculativeConfig(
        model=str(place),
        num_speculative_tokens=K,
        quantization=kind,
        num_tree_nodes=tree_nodes or 0,
    )
    config = EngineConfig(max_num_seqs=1 if tree_nodes else requests, draft_length="fixed")
    return LLM(bundled("target"), speculation, config)


def measure(
    llm: LLM, texts: list[str], temperature: float, tokens: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """What speculation did for all prompts together, and their answers."""
    how = [
        SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=seed)
        for seed in range(len(texts))
    ]
    done = llm.generate(texts, how)
    figures = {
        "acceptance_length": acceptance_length(done),
        "interval": acceptance_interval(done),
        "acceptance_rate_per_position": acceptance_rates(done),
    }
    return figures, [list(completion.token_ids) for completion in done]


if __name__ == "__main__":
    run(main)
