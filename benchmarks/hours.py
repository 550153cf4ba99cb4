"""GPU-hours, memory and disk that drafters for several targets take, by the dry run's formulas.

    python benchmarks/hours.py

Counts what `peagle train --dry-run` counts, with the project's recipes, for targets that exist here
as sizes only; nothing is measured but the rate: that of a bare product on an H200, rested, as the
dry run takes it (8,192 rows of gates in benchmarks/results/products_2026-11-23.json).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from peagle.bench.random_weights import PLAIN, Weights, target_bytes
from peagle.bench.shapes import shape_of
from peagle.cli.script import run
from peagle.models.decoder import Decoder
from peagle.models.loading import Stored
from peagle.models.spec import DecoderSpec, LayerSpec, MLPSpec
from peagle.train.conversations import Summary
from peagle.train.feature_cache import cache_bytes
from peagle.train.initial import choose_trained, drafter_config, new_head
from peagle.train.packing import Document, pack
from peagle.train.plan import Forecast, in_products
from peagle.train.prepare import Preflight
from peagle.train.recipe import Recipe
from peagle.train.teacher import Teacher

RECIPES = Path(__file__).parents[1] / "recipes"
TFLOPS = 759.0
FLOAT32, BFLOAT16 = 4, 2
DOCUMENT, PROMPT = 1024, 128
"""Tokens of each conversation, and of them before the answer."""
SMALL, LARGE = 150e6, 1e9
"""Tokens seen in training, counted each time they are seen."""
LEAST = {"draft_vocab_size": 32_000, "train_head": False}
"""What takes the least memory of what a recipe may ask for at little cost."""
HEADING = (
    "| target | drafter | GPU-hours for 150M tokens | for 1G | GiB of memory "
    "| with a frozen head of 32,000 | GiB on disk | KiB of features a token |"
)
QWEN3_8B = shape_of("qwen3-8b").target
QWEN3_1_7B = DecoderSpec(
    vocab_size=QWEN3_8B.vocab_size,
    hidden_size=2048,
    layers=28 * (LayerSpec(replace(QWEN3_8B.attention[0], num_heads=16), MLPSpec(6144)),),
    max_length=QWEN3_8B.max_length,
    tie_word_embeddings=True,
)
GPT_OSS_20B = shape_of("gpt-oss-20b").target


@dataclass(frozen=True)
class Case:
    """A target's sizes, and the recipe for its drafter."""

    name: str
    target: DecoderSpec
    recipe: str
    weights: Weights = PLAIN
    """The format of its weights."""

    def plan(self, changes: Mapping[str, Any]) -> Forecast:
        """The run as a GPU would take it, on a step's rows full of conversations."""
        given = Recipe.load(RECIPES / f"{self.recipe}.yaml")
        recipe = given.model_copy(update={"shard_target": False, **changes})
        one = Document.answered((0,) * DOCUMENT, PROMPT)
        documents = [one] * (recipe.rows_per_step * recipe.row_length // DOCUMENT)
        rows = pack(documents, recipe.row_length)
        config = drafter_config(recipe, self.target)
        teacher = Teacher(Path(), self.target, own=True)
        with torch.device("meta"):
            multiplied = in_products(Decoder(self.target, 1).layers)
            model = new_head(config, 1, self.target).to(torch.bfloat16)
        choose_trained(recipe, model)
        summary = Summary(len(documents), rows.tokens.numel(), 0, 0, 0, 0)
        ready = Preflight(recipe, teacher, config, rows, rows, summary, {})
        device = torch.device("cuda")
        return Forecast(
            **vars(ready), device=device, multiplied=multiplied, stored=self.stored, model=model
        )

    @property
    def stored(self) -> Stored:
        """The target's memory."""
        ends = target_bytes(replace(self.target, layers=()), torch.bfloat16)
        return Stored(ends, target_bytes(self.target, torch.bfloat16, self.weights) - ends)

    def row(self, rate: float) -> str:
        """A line of the table. rate: operations per second of a bare product."""
        plan, least = self.plan({}), self.plan(LEAST)
        seconds = plan.seconds(sum(plan.operations().values()), rate) / plan.step.tokens
        parameters = sum(each.trained + each.frozen for each in plan.parameters().values())
        hours = (f"{tokens * seconds / 3600:.1f}" for tokens in (SMALL, LARGE))
        sizes = (sum(plan.memory().values()), sum(least.memory().values()), _kept(plan))
        features = cache_bytes(plan.recipe, plan.config, 1) / plan.recipe.row_length
        cells = (self.name, f"{parameters / 1e9:.1f} G", *hours, *map(_gib, sizes))
        return f"| {' | '.join(cells)} | {features / 2**10:.0f} |"


CASES = (
    Case("Qwen3-1.7B", QWEN3_1_7B, "qwen3-8b"),
    Case("Qwen3-8B", QWEN3_8B, "qwen3-8b"),
    Case("Qwen3-30B-A3B", shape_of("qwen3-30b-a3b").target, "qwen3-coder-30b-a3b"),
    Case("GPT-OSS-20B", GPT_OSS_20B, "gpt-oss-20b", Weights("mxfp4")),
    Case("Qwen3.8-27B", shape_of("qwen3.8-27b").target, "qwen3.8-27b"),
    Case("Qwen3.6-35B-A3B", shape_of("qwen3.6-35b-a3b").target, "qwen3.6-35b-a3b"),
)


def _kept(plan: Forecast) -> int:
    """Bytes of the drafter, and of the snapshot from which a run continues."""
    counts = plan.parameters().values()
    trained, frozen = (
        sum(getattr(each, kind) for each in counts) for kind in ("trained", "frozen")
    )
    snapshot = FLOAT32 * trained + plan.memory()["optimizer"]
    return snapshot + BFLOAT16 * (trained + frozen)


def _gib(size: int) -> str:
    return f"{size / 2**30:.0f}"


def main(
    tflops: Annotated[float, typer.Option(help="Rate of a bare product, TFLOP/s.")] = TFLOPS,
) -> None:
    """Print the table."""
    print(HEADING, "|---|--:|--:|--:|--:|--:|--:|--:|", sep="\n")
    for case in CASES:
        print(case.row(tflops * 1e12))


if __name__ == "__main__":
    run(main)
