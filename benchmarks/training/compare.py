"""P-EAGLE against EAGLE-3 on the bundled target: the same conversations, steps and tokens.

    python benchmarks/training/compare.py train answers.jsonl --out drafters --seconds 280 \\
        --gpus 3 --arms eagle3,deeper,deeper_near rows_per_step=16 rows_per_pass=16
    python benchmarks/training/compare.py measure drafters --prompts HumanEval.jsonl.gz --out FILE

`measure` decodes greedily with the engine, in float32 on a CPU; every drafter answers the same
prompts, and the intervals are taken over those.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import held_out
import typer
from ablations import BASE, RECIPES, brief
from sweep import Arm, K, Sweep

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.bench.environment import machine
from peagle.bench.prompts import Prompt, load_prompts
from peagle.bench.result_file import result_file
from peagle.cli.script import new_app
from peagle.completion import check_finished
from peagle.config import EngineConfig
from peagle.pair import bundled
from peagle.train.recipe import Recipe

app = new_app(__doc__)
EAGLE3 = {
    "method": "eagle3",
    "mask_token_id": None,
    "num_hidden_layers": 1,
    "intermediate_size": None,
    "selector_rank": None,
    "dpace": None,
    "elements_per_segment": None,
}
"""Keys in which recipes/demo/eagle3.yaml differs from peagle.yaml, and one of `BASE`."""
WIDE = {"intermediate_size": 896}
"""The target's own width, as EAGLE-3 has."""
NEAR = {**WIDE, "num_speculative_tokens": 6}
"""Spends little on depths that K = 5 never reads."""
DEEP, DEEPER = {**NEAR, "num_hidden_layers": 6}, {**NEAR, "num_hidden_layers": 8}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("eagle3", EAGLE3),
        Arm("peagle"),
        Arm("wide", WIDE),
        Arm("near_begun", NEAR, inherits=True),
        Arm("deep", DEEP),
        Arm("deep_begun", DEEP, inherits=True),
        Arm("deeper", DEEPER),
        Arm("deeper_near", {**DEEPER, "num_speculative_tokens": 5}),
    )
}


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="The target's answers, recipes/demo step 5.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value of the recipe.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the drafters.")] = ...,
    arms: Annotated[str, typer.Option(help=f"Some of {', '.join(ARMS)}.")] = "eagle3,peagle",
    steps: Annotated[int, typer.Option(help="Most steps of each drafter.")] = 10_000,
    seconds: Annotated[
        float | None, typer.Option(help="As many steps as the slowest takes in this time.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that the drafters are spread over.")] = 1,
) -> None:
    """Train drafters, all at once."""
    given = [f"data=[{data}]", f"output={out}", f"steps={steps}", *BASE, *(overrides or [])]
    sweep = Sweep.read(Recipe.load(RECIPES / "peagle.yaml", given), seconds, keep=True)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "training.jsonl").open("a") as file:
        for result in sweep.run([ARMS[name] for name in arms.split(",")], gpus):
            print(brief(result), flush=True)
            print(json.dumps(result), file=file, flush=True)


@app.command()
def measure(
    drafters: Annotated[Path, typer.Argument(help="Directory of drafters, eagle3 among them.")],
    prompts: Annotated[list[str], typer.Option(help="Prompt files, or bundled.")] = ["bundled"],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Only this many prompts of each file.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    target: Annotated[Path | None, typer.Option(help="Another target's directory.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Measure each drafter's acceptance length at K = 5, and its difference from EAGLE-3's."""
    asked = [prompt for source in prompts for prompt in load_prompts(source, limit)]
    model = str(target or bundled("target"))
    places = sorted(path.parent for path in drafters.glob("*/config.json"))
    with result_file(out) as write:
        counts = {place.name: decode(model, place, asked, max_tokens) for place in places}
        result = machine() | {
            "prompts": list(prompts),
            "count": len(asked),
            "max_tokens": max_tokens,
            "k": K,
            "drafters": {name: summary(counts[name], counts["eagle3"]) for name in counts},
        }
        for name, figures in result["drafters"].items():
            print(f"{name:16} {json.dumps(figures)}")
        write(result)


def decode(
    target: str, drafter: Path, prompts: Sequence[Prompt], max_tokens: int
) -> list[tuple[int, int]]:
    """Tokens and cycles of each prompt's greedy answer, which does not end at end-of-text."""
    config = EngineConfig(device="cpu", dtype="float32", max_num_seqs=8, draft_length="fixed")
    how = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    llm = LLM(target, SpeculativeConfig(model=str(drafter), num_speculative_tokens=K), config)
    tokens = [prompt.token_ids(llm.tokenizer) for prompt in prompts]
    done = llm.generate(tokens, how)
    check_finished(done)
    did = [completion.speculation for completion in done]
    return [(each.cycles + each.accepted, each.cycles) for each in did]


def summary(counts: held_out.Counts, reference: held_out.Counts) -> dict[str, Any]:
    """AL, its interval, and its paired difference from the reference."""
    by, low, high = held_out.difference(counts, reference)
    return {
        "acceptance_length": round(held_out.acceptance_length(counts), 4),
        "interval": [round(bound, 4) for bound in held_out.interval(counts)],
        "difference": round(by, 4),
        "difference_interval": [round(low, 4), round(high, 4)],
    }


if __name__ == "__main__":
    app()
