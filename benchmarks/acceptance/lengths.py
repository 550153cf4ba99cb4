"""Acceptance lengths of the bundled drafters, as they are and rounded to FP8.

    python benchmarks/acceptance/lengths.py --prompts HumanEval.jsonl.gz

The target decides, so that the text must be the same in all cases of one temperature.
"""

from pathlib import Path
from typing import Annotated

import typer

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.bench.prompts import load_prompts
from peagle.cli.script import run
from peagle.config import DrafterFormat, EngineConfig
from peagle.engine.request import Speculation
from peagle.pair import bundled

K = 7
FORMATS: tuple[DrafterFormat | None, ...] = (None, "fp8")


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines of prompts.")],
    limit: Annotated[int, typer.Option(help="How many of them.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,1",
) -> None:
    """Print a line for each drafter, temperature and format."""
    texts = [prompt.text for prompt in load_prompts(prompts, limit)]
    for drafter in ("peagle", "eagle3"):
        for temperature in map(float, temperatures.split(",")):
            answers = set()
            for kind in FORMATS:
                speculation, answer = measure(drafter, kind, texts, temperature, tokens)
                answers.add(answer)
                length = speculation.acceptance_length
                print(
                    f"{drafter:8}T = {temperature:<5}{kind or 'as it is':10}{length:.3f}",
                    flush=True,
                )
            assert len(answers) == 1, "a drafter changed a token"


def measure(
    drafter: str, kind: DrafterFormat | None, texts: list[str], temperature: float, tokens: int
) -> tuple[Speculation, tuple[tuple[int, ...], ...]]:
    """What speculation did for all prompts together, and their answers."""
    config = SpeculativeConfig(
        model=str(bundled(drafter)), num_speculative_tokens=K, quantization=kind
    )
    llm = LLM(bundled("target"), config, EngineConfig(max_num_seqs=len(texts)))
    how = [
        SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=seed)
        for seed in range(len(texts))
    ]
    done = llm.generate(texts, how)
    answers = tuple(tuple(completion.token_ids) for completion in done)
    return Speculation.pooled([completion.speculation for completion in done]), answers


if __name__ == "__main__":
    run(main)
