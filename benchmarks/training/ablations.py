"""The paper's training choices on the bundled target: do they rank drafters as in the paper?

    python benchmarks/training/ablations.py train answers.jsonl --seconds 150 --out FILE.jsonl
    python benchmarks/training/ablations.py draw FILE.jsonl

Every drafter sees the same conversations in the same order, for the same number of steps; AL is
estimated on the same held-out conversations. `answers.jsonl` is made by recipes/demo.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import held_out
import typer
from mask_slots import SLOTS
from sweep import Arm, Sweep

from peagle.cli.script import new_app
from peagle.pair import bundled
from peagle.train.recipe import Recipe

app = new_app(__doc__)
RECIPES = Path(__file__).parents[2] / "recipes" / "demo"
BASE = (
    f"target={bundled('target')}",
    "validation_documents=1024",
    "warmup_steps=50",
    "elements_per_segment=131072",  # all of a step's elements at once: the models are small
    "selector_rank=null",  # the paper's method has neither
    "dpace=null",
)
LONG, SHORT = 588, 192
"""Tokens of the longest conversations, and the length that short ones are cut to."""


@dataclass(frozen=True)
class Choice:
    """One way of training, and the paper's AL at K = 5 for it on HumanEval and MT-Bench."""

    label: str
    arm: Arm
    paper: tuple[float, float | None] | None = None


def one_layer(name: str, longest: int | None = None, **changes: Any) -> Arm:
    """A change relative to 1 layer, K_train 8, whole conversations, trained embeddings, r 0.8."""
    return Arm(name, {"num_hidden_layers": 1, **changes}, longest=longest)


FOUR, TWO, ONE = Arm("4 layers"), Arm("2 layers", {"num_hidden_layers": 2}), one_layer("1 layer")
STUDIES = {
    "hidden state of mask slots (4 layers; section 4.1, GPT-OSS 20B)": [
        Choice(name, Arm(name, slot=slot) if name != "shared" else FOUR, (length, None))
        for (name, slot), length in zip(SLOTS.items(), (3.16, 2.85, 2.81, 2.68, 2.94), strict=True)
    ],
    "layers (table 4)": [
        Choice("1", ONE, (2.69, 2.41)),
        Choice("2", TWO, (3.58, 2.76)),
        Choice("4", FOUR, (3.92, 3.04)),
    ],
    "embeddings (1 layer; table 5)": [
        Choice("frozen", one_layer("frozen", train_embeddings=False), (2.56, 2.29)),
        Choice("trained", ONE, (2.69, 2.41)),
    ],
    "K_train (1 layer; table 6)": [
        Choice("5", one_layer("K_train 5", num_speculative_tokens=5), (2.41, 2.20)),
        Choice("8", ONE, (2.51, 2.26)),
    ],
    "training length (1 layer; table 8: 512 and 2,048)": [
        Choice(f"{SHORT}", one_layer("short", SHORT), (2.51, 2.26)),
        Choice(f"{LONG}", ONE, (2.56, 2.29)),
    ],
    "COD ratio r (1 layer; not in the paper)": [
        Choice("0.5", one_layer("r 0.5", cod_ratio=0.5)),
        Choice("0.8", ONE),
        Choice("1.0", one_layer("r 1.0", cod_ratio=1.0)),
    ],
}


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="The target's answers, recipes/demo step 5.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value of the recipe.")] = None,
    out: Annotated[Path, typer.Option(help="JSONL file to append to, a line per drafter.")] = ...,
    steps: Annotated[int, typer.Option(help="Most steps of each drafter.")] = 3000,
    seconds: Annotated[
        float | None, typer.Option(help="As many steps as the slowest takes in this time.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that the drafters are spread over.")] = 1,
    variants: Annotated[int | None, typer.Option(help="Only this many, the first ones.")] = None,
) -> None:
    """Train all drafters at once."""
    given = [f"data=[{data}]", f"steps={steps}", *BASE, *(overrides or [])]
    recipe = Recipe.load(RECIPES / "peagle.yaml", given)
    sweep = Sweep.read(recipe, seconds)
    with out.open("a") as file:
        for result in sweep.run(list(arms())[:variants], gpus):
            print(brief(result), flush=True)
            print(json.dumps(result | {"seed": recipe.seed}), file=file, flush=True)


def arms() -> Iterator[Arm]:
    """Every arm once."""
    choices = itertools.chain.from_iterable(STUDIES.values())
    yield from {choice.arm.name: choice.arm for choice in choices}.values()


def brief(result: dict[str, Any]) -> str:
    """A result as one line."""
    if "error" in result:
        return f"{result['arm']}: {result['error']}"
    low, high = result["interval"]
    depths = " ".join(f"{share:.3f}" for share in result["accuracy"])
    return (
        f"{result['arm']:26} AL {result['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]  "
        f"loss {result['loss']:.3f}  {result['steps']} steps  {result['seconds']:.0f} s  {depths}"
    )


@app.command()
def draw(
    results: Annotated[Path, typer.Argument(help="What `train` wrote.")],
    plot: Annotated[Path | None, typer.Option(help="PNG file to draw.")] = None,
) -> None:
    """Print the table, and draw it with the paper's numbers."""
    from ablation_plot import draw_studies

    found = {line["arm"]: line for line in map(json.loads, results.open()) if "error" not in line}
    print(table(found))
    if plot is not None:
        draw_studies(STUDIES, found, plot)


def table(found: dict[str, dict[str, Any]]) -> str:
    """A Markdown table: AL with its interval, and its difference from each study's first line."""
    lines = [
        "| | AL at K = 5 | to the first | the paper: HumanEval, MT-Bench |",
        "|---|---|---|---|",
    ]
    for title, choices in STUDIES.items():
        there = [choice for choice in choices if choice.arm.name in found]
        if len(there) > 1:
            lines.append(f"| **{title}** | | | |")
            lines += [_line(choice, there[0], found) for choice in there]
    return "\n".join(lines)


def _line(choice: Choice, first: Choice, found: dict[str, dict[str, Any]]) -> str:
    result, other = found[choice.arm.name], found[first.arm.name]
    length, (low, high) = result["acceptance_length"], result["interval"]
    more = ""
    if choice is not first:
        by, least, most = held_out.difference(result["held_out"], other["held_out"])
        more = f"{by:+.3f} [{least:+.3f}, {most:+.3f}]"
    said = ", ".join(f"{value:.2f}" for value in choice.paper or () if value is not None)
    return f"| {choice.label} | {length:.3f} [{low:.3f}, {high:.3f}] | {more} | {said} |"


if __name__ == "__main__":
    app()
